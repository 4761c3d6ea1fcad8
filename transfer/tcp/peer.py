"""The messages between this PE and one other, and the state of their connections."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tandem.transfer.errors import PeerGone, TransportTimeout
from tandem.transfer.tcp.frames import DATA_CONNECTIONS

Counts = tuple[int, ...]  # of frames on each data connection, then of posts


class Peer:
    """Shared by the step thread and the threads of this peer's connections, under `lock`.

    Where one connection is lost, all are: nobody knows what of its frames has landed, so that no later signal may. The
    peer stays lost for the rest of its epoch. Another process in its place is another Peer.
    """

    def __init__(self, pe: int) -> None:
        self.pe = pe
        self.lock = threading.Lock()
        self.given = [0] * (DATA_CONNECTIONS + 1)  # to be sent to the peer
        self.acknowledged: Counts = (0,) * (DATA_CONNECTIONS + 1)  # of those, what the peer says has landed there
        self.landed = [0] * (DATA_CONNECTIONS + 1)  # the peer's, here
        self.frame_landed = threading.Condition(self.lock)
        self.progress = threading.Condition(self.lock)  # something was sent or acknowledged
        self.signals_due = threading.Condition(self.lock)
        self.frames_due = [threading.Condition(self.lock) for _ in range(DATA_CONNECTIONS)]
        self.failure = ""
        self.is_over = False  # whether end() has returned
        self._sockets: list[socket.socket] = []
        self._receivers = 0

    def adopt(self, connection: socket.socket) -> None:
        """Makes fail() end this connection, too, from now on. PeerGone after a loss."""
        with self.lock:
            self.check()
            self._sockets.append(connection)

    @contextmanager
    def receiving(self, connection: socket.socket) -> Iterator[None]:
        """While a thread reads the connection into pages or the mailbox. PeerGone after a loss."""
        self.adopt(connection)
        with self.lock:
            self._receivers += 1
        try:
            yield
        finally:
            with self.lock:
                self._receivers -= 1
                self.progress.notify_all()

    def check(self) -> None:
        """Raises PeerGone after a loss. The caller has the lock."""
        if self.failure:
            raise PeerGone(f"PE {self.pe}: {self.failure}")

    def fail(self, reason: str) -> None:
        """Ends all connections, and wakes all threads that wait. Only the first reason stays."""
        with self.lock:
            self.failure = self.failure or reason
            for connection in self._sockets:
                cut(connection)
            self._sockets.clear()
            for waiting in (self.frame_landed, self.progress, self.signals_due, *self.frames_due):
                waiting.notify_all()

    def end(self, reason: str, seconds: float) -> None:
        """Fails the peer as fail() does. When this returns, none of its writes lands any more. TransportTimeout."""
        self.fail(reason)
        with self.lock:
            if not self.progress.wait_for(lambda: not self._receivers, seconds):
                raise TransportTimeout(f"a connection of PE {self.pe} did not end within {seconds:g} s")
            self.is_over = True

    def has_landed(self, counts: Counts) -> bool:
        """Whether the peer says so of all frames and posts that `counts` counts. The caller has the lock."""
        return all(there >= wanted for there, wanted in zip(self.acknowledged, counts, strict=True))


def cut(connection: socket.socket) -> None:
    """Ends what other threads read or write there. Its owner closes it."""
    with suppress(OSError):  # not connected any more
        # Not SSLSocket's own: that would first let a reader take encrypted bytes for plain ones.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
