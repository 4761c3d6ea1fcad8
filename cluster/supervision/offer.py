"""A running cluster's offer to give way to a new one of its name, and the lines that the two exchange.

Their versions of tandem may differ, so they share nothing but these lines: JSON objects over a socket of this host.
"""

import hashlib
import json
import logging
import os
import socket
import threading
from contextlib import suppress
from typing import Any, Protocol

from tandem import __version__
from tandem.cluster.errors import TandemError
from tandem.cluster.processes.forks.fork_orders import is_ours

PROTOCOL = 1  # another number is refused by both sides
LINE_BYTES = 1 << 16
log = logging.getLogger(__name__)


class Replaced(Protocol):
    """The cluster that gives way: Cluster."""

    def offered(self) -> dict[str, Any]: ...
    def rest(self, rests: bool) -> None: ...
    def scale_islands(self, number: int) -> None: ...
    def give_way(self) -> None: ...


class Line:
    """One end of the connection. Everything but close() belongs to one thread.

    | the old cluster says, at first    | protocol, version, pid, islands, ports, ray, device           |
    | the new one says                  | the old one answers                                           |
    | {"islands": 2}                    | {"islands": 2} once it has no more, or {"error": "…"}         |
    | {"end": true}                     | {"end": seconds that its calls have}, then the end, when it ends |

    A new one that goes without `end` has failed: the old one takes back the islands that it has given up.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. OSError if the other side is gone."""
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None) -> dict[str, Any] | None:
        """Returns the next message; None after the last. TimeoutError after `seconds`; ValueError for anything that is
        no message."""
        self._connection.settimeout(seconds)
        while b"\n" not in self._read:
            if len(self._read) > LINE_BYTES:
                raise ValueError("a line has no end")
            try:
                more = self._connection.recv(4096)
            except ConnectionError:
                return None
            if not more:
                return None
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a line is no object")
        return message

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Offer:
    """A thread that waits for new clusters, from the constructor to close(). It serves one at a time.

    If another process has the socket's name, a warning is logged, and the cluster cannot be replaced.
    """

    def __init__(self, name: str, cluster: Replaced) -> None:
        self._cluster = cluster
        self._line: Line | None = None
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(socket_name(name))
            self._listener.listen(1)
        except OSError as error:
            log.warning("`tandem up --replace` cannot replace this cluster: %s", error.strerror)
            self._listener.close()
            return
        threading.Thread(target=self._run, name="offer", daemon=True).start()

    def close(self) -> None:
        """Closes the offer. Idempotent. A new cluster that was told of the end learns by this that the end has come."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which accept() notices
        self._listener.close()
        if self._line is not None:
            self._line.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not is_ours(connection):
                connection.close()
                continue
            self._line = Line(connection)
            kept = self._cluster.offered()["islands"]
            try:
                if self._serve(self._line):
                    return  # the line is closed at the end
            except (OSError, ValueError) as error:
                log.warning("the new cluster of this name cannot be understood: %s", error)
            self._line.close()
            if not self._closed:
                self._restore(kept)

    def _serve(self, line: Line) -> bool:
        """Answers one new cluster. Returns whether this cluster ends."""
        hello = {"protocol": PROTOCOL, "version": __version__, "pid": os.getpid()} | self._cluster.offered()
        line.send(hello)
        self._cluster.rest(True)
        while (order := line.receive(None)) is not None:
            if "end" in order:
                line.send({"end": hello["drain"]})
                log.info("the cluster gives way to a new one of its name")
                self._cluster.give_way()
                return True
            try:
                self._cluster.scale_islands(int(order["islands"]))
                line.send({"islands": order["islands"]})
            except (TandemError, KeyError, TypeError) as error:
                line.send({"error": f"{error}"})
        return False

    def _restore(self, kept: int) -> None:
        try:
            self._cluster.scale_islands(kept)
        except TandemError as error:
            log.warning("the new cluster of this name has failed, and the islands given up do not start: %s", error)
        else:
            log.warning("the new cluster of this name has failed; this one keeps serving with %d islands", kept)
        self._cluster.rest(False)


def socket_name(name: str) -> str:
    """Returns the address of the offer of this user's cluster: an abstract one, which ends with its process."""
    return f"\0tandem/offer/{os.getuid()}/{hashlib.sha256(name.encode()).hexdigest()[:32]}"
