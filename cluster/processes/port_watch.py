"""A watch over servers: the kernel closes a connection as soon as the process at its other end has ended."""

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

POLL_SECONDS = 0.5  # until close() is noticed
AGAIN_SECONDS = 0.05
CONNECT_SECONDS = 5.0  # a server that is only stopped or slow accepts by its backlog


class PortWatch:
    """A thread that holds a connection to each server and sends nothing.

    A server may close an idle connection. It counts as lost when no other can be had for `patience_seconds`.
    """

    def __init__(
        self, servers: Mapping[str, tuple[str, int]], patience_seconds: float, lost: Callable[[str], None]
    ) -> None:
        """servers: (host, port) by name. lost: called once, from the thread, with the name of one that is lost."""
        self._servers = servers
        self._patience_seconds = patience_seconds
        self._lost = lost
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch of ports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        held: dict[socket.socket, str] = {}
        try:
            for name in self._servers:
                if not self._hold(name, held):
                    return
            while not self._closed.is_set():
                for one in select.select(list(held), [], [], POLL_SECONDS)[0]:
                    if _has_ended(one):
                        one.close()
                        if not self._hold(held.pop(one), held):
                            return
        finally:
            for one in held:
                one.close()

    def _hold(self, name: str, held: dict[socket.socket, str]) -> bool:
        """Whether there is a connection, which is then held."""
        deadline = time.monotonic() + self._patience_seconds
        while not self._closed.is_set():
            try:
                held[socket.create_connection(self._servers[name], CONNECT_SECONDS)] = name
                return True
            except OSError:
                if time.monotonic() > deadline:
                    self._lost(name)
                    return False
            self._closed.wait(AGAIN_SECONDS)
        return False


def _has_ended(one: socket.socket) -> bool:
    """Whether the other end is closed; what it sends is not wanted."""
    try:
        return not one.recv(4096)
    except OSError:
        return True
