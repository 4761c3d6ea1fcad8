"""The gateway's ports, held for as long as a cluster lives, so that its processes can share them by SO_REUSEPORT."""

import socket
from collections.abc import Set
from contextlib import ExitStack

from tandem.cluster.config.sections import GatewaySection, MetricsSection
from tandem.cluster.errors import StartFailed


class SharedPorts:
    """Sockets that are bound and never listen: connections go to the gateway's processes, which bind the same ports.

    SO_REUSEPORT would let any process of this user share a port that another program listens on. So a port is first
    bound without that option. A name in the sockets' abstract namespace keeps out a second cluster that starts at the
    same time.
    """

    def __init__(
        self,
        host: str,
        port: int,
        http_port: int | None,
        metrics: tuple[str, int | None] = ("", None),
        beside: Set[int] = frozenset(),
    ) -> None:
        """Takes the ports, a free one for 0. metrics: host and port of its own. Raises StartFailed.

        beside: ports of a cluster of this user that this one replaces.
        """
        self._held = ExitStack()
        self._beside = beside
        try:
            self.port = self._hold(host, port, "gateway.port", "--grpc-port")
            self.http_port = self.metrics_port = None
            if http_port is not None:
                self.http_port = self._hold(host, http_port, "gateway.http_port", "--http-port")
            metrics_host, metrics_port = metrics
            if metrics_port is not None:
                self.metrics_port = self._hold(metrics_host, metrics_port, "metrics.port", "--set metrics.port=…")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        self._held.close()

    def _hold(self, host: str, port: int, key: str, option: str) -> int:
        if port not in self._beside:
            _check_port(host, port, key, option)
        try:
            held = self._held.enter_context(_socket(host))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, port))
            number = held.getsockname()[1]
            if number not in self._beside:
                name = self._held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                name.bind(f"\0tandem-gateway-{host}-{number}")
        except OSError as error:
            raise _refused(host, port, key, option, error) from error
        return number


def check_ports(section: GatewaySection, metrics: MetricsSection, beside: Set[int] = frozenset()) -> None:
    """Raises StartFailed when another program has one of the ports.

    beside: see SharedPorts. If gateway.nodes may leave this host out, its ports do not count.
    """
    is_here = not (section.node_resources or section.node_labels)
    if is_here and section.port not in beside:
        _check_port(section.host, section.port, "gateway.port", "--grpc-port")
    over_http = (
        (section.host, section.http_port, "gateway.http_port", "--http-port"),
        (metrics.host, metrics.port, "metrics.port", "--set metrics.port=…"),
    )
    for host, port, key, option in over_http:
        if port is not None and is_here and port not in beside:
            _check_port(host, port, key, option)


def _check_port(host: str, port: int, key: str, option: str) -> None:
    if port == 0:
        return
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _refused(host, port, key, option, error) from error


def _refused(host: str, port: int, key: str, option: str, error: OSError) -> StartFailed:
    return StartFailed(
        f"{key} {port} on {host} cannot be opened ({error.strerror}); "
        f"choose a free one with {option}, or 0 for any free one"
    )


def _socket(host: str) -> socket.socket:
    one = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if host == "::":
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return one
