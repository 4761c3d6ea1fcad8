"""The running cluster that a new one of its name replaces, as the new one's launcher sees it."""

import socket
from typing import Any, Self

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ClusterNotRunning, StartFailed
from tandem.cluster.processes.forks.fork_orders import is_ours
from tandem.cluster.supervision.offer import PROTOCOL, Line, socket_name

HELLO_SECONDS = 10.0
SCALE_SECONDS = 900.0
END_SECONDS = 300.0  # beyond the seconds that its calls have


class Predecessor:
    """The running cluster, held from the constructor to close(). Without a call of end() it keeps serving.

    A cluster that ends by itself has no islands any more, and end() returns at once. Raises ClusterNotRunning if no
    cluster of that name offers to give way, StartFailed if it cannot.
    """

    def __init__(self, name: str) -> None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(HELLO_SECONDS)
        self._line = Line(connection)
        try:
            connection.connect(socket_name(name))
            if not is_ours(connection):
                raise StartFailed(f"the offer of cluster {name!r} belongs to another user's process")
            hello = self._line.receive(HELLO_SECONDS)
        except TimeoutError:
            self.close()
            raise StartFailed(f"cluster {name!r} does not answer; another `up --replace` may be replacing it") from None
        except OSError:
            self.close()
            raise ClusterNotRunning(
                f"name is {name!r}: no cluster of that name runs here, or none of a version that can be replaced; "
                "leave out --replace, and stop an older one by `tandem down`"
            ) from None
        except BaseException:
            self.close()
            raise
        if hello is None or hello.get("protocol") != PROTOCOL:
            self.close()
            found = "ends" if hello is None else f"is replaced by protocol {hello.get('protocol')}"
            raise StartFailed(
                f"cluster {name!r} {found}; this version of tandem replaces clusters by protocol {PROTOCOL}: "
                "stop it by `tandem down`"
            )
        self._hello = hello
        self.islands: int = hello["islands"]  # that it has; 0 once it has ended

    @property
    def words(self) -> str:
        """Names the old cluster for people."""
        return f"pid {self._hello['pid']}, tandem {self._hello['version']}, {self.islands} islands"

    @property
    def ports(self) -> frozenset[int]:
        """The ports of the old cluster, on which the new one listens next to it."""
        return frozenset(port for port in self._hello["ports"].values() if port)

    def with_ports(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the configuration with the old cluster's port in place of each free one."""
        ports = self._hello["ports"]
        gateway, metrics = config.gateway, config.metrics
        chosen = {
            "port": gateway.port or ports.get("grpc") or 0,
            "http_port": ports.get("http") or 0 if gateway.http_port == 0 else gateway.http_port,
        }
        monitor = ports.get("metrics") or 0 if metrics.port == 0 else metrics.port
        return config.model_copy(
            update={
                "gateway": gateway.model_copy(update=chosen),
                "metrics": metrics.model_copy(update={"port": monitor}),
            }
        )

    def check_ray(self, address: str, device: str) -> None:
        """Raises StartFailed for GPUs of two Rays: neither knows which GPUs the other fills."""
        if device == self._hello["device"] == "cuda" and address != self._hello["ray"]:
            raise StartFailed(
                f"island.device is cuda, and the running cluster's Ray is another one, at {self._hello['ray']}: one "
                "Ray must know which GPUs are free. Start a Ray by `ray start`, and both clusters with --address"
            )

    def give_up(self) -> None:
        """Makes it end one island, drained. StartFailed if it has only one left, or refuses."""
        if self.islands == 1:
            raise StartFailed(
                "there is no room for another island, and the running cluster cannot give up its only one"
            )
        answer = self._ask({"islands": self.islands - 1}, SCALE_SECONDS)
        if answer is not None and "error" in answer:
            raise StartFailed(f"the running cluster does not give up an island: {answer['error']}")
        self.islands = 0 if answer is None else self.islands - 1

    def end(self) -> None:
        """Ends it, and returns then: its gateway takes no more calls, and running ones have its drain seconds."""
        answer = self._ask({"end": True}, HELLO_SECONDS)
        if answer is not None:
            try:
                self._line.receive(END_SECONDS + answer["end"])
            except TimeoutError:
                raise StartFailed(f"the running cluster ({self.words}) was told to end, and does not") from None
        self.islands = 0

    def close(self) -> None:
        """Idempotent."""
        self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, order: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Asks it. None if it has ended."""
        try:
            self._line.send(order)
            return self._line.receive(seconds)
        except TimeoutError:
            raise StartFailed(f"the running cluster ({self.words}) does not answer within {seconds:g} s") from None
        except OSError:
            return None
