"""A watch over a server: the kernel closes a connection as soon as the process at its other end has ended."""

import math
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

POLL_SECONDS = 0.5  # until close() is noticed
AGAIN_SECONDS = 0.05
CONNECT_SECONDS = 5.0  # the backlog of a stopped or slow server still accepts
# The kernel's probes find out that a host is gone, because a lost host closes no connection.
IDLE_SECONDS, PROBE_SECONDS, PROBES = 4, 2, 4


class PortWatch:
    """A thread that holds a connection to a server and sends nothing.

    A server may close an idle connection. The server counts as lost when no new connection succeeds for
    `patience_seconds`.
    """

    def __init__(
        self,
        server: tuple[str, int],
        patience_seconds: float,
        lost: Callable[[], None],
        back: Callable[[], bool] | None = None,
    ) -> None:
        """server: host and port. lost: called from the thread.

        back: called when a lost server can be reached again. It returns whether this is the lost server, and all goes
        on; otherwise it is called again. None: the watch ends with the loss.
        """
        self._server = server
        self._patience_seconds = patience_seconds
        self._lost = lost
        self._back = back
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of a port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch. Idempotent. From any thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            held = self._connect(self._patience_seconds, lambda: True)
            if held is None and not self._closed.is_set():
                self._lost()
                held = None if self._back is None else self._connect(math.inf, self._back)
            if held is None:
                return
            with closing(held):
                self._hold(held)

    def _hold(self, held: socket.socket) -> None:
        """Returns when the other end is closed, or the watch."""
        while not self._closed.is_set():
            if select.select([held], [], [], POLL_SECONDS)[0] and _has_ended(held):
                return

    def _connect(self, seconds: float, suits: Callable[[], bool]) -> socket.socket | None:
        """Connects once suits() accepts the server. None after so many seconds, or when the watch is closed."""
        deadline, pause = time.monotonic() + seconds, AGAIN_SECONDS
        while not self._closed.is_set():
            try:
                held = socket.create_connection(self._server, CONNECT_SECONDS)
            except OSError:
                if time.monotonic() > deadline:
                    return None
            else:
                if suits():
                    return _probed(held)
                held.close()
            self._closed.wait(pause)
            pause = min(2 * pause, POLL_SECONDS)
        return None


def _probed(one: socket.socket) -> socket.socket:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for setting, value in zip(settings, (IDLE_SECONDS, PROBE_SECONDS, PROBES), strict=True):
        one.setsockopt(socket.IPPROTO_TCP, setting, value)
    return one


def _has_ended(one: socket.socket) -> bool:
    """Returns whether the other end is closed or gone. Discards what it sends."""
    try:
        return not one.recv(4096)
    except OSError:
        return True
