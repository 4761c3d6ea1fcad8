"""What this PE and one other have sent each other, and whether the connections between them stand."""

import socket
import threading
from contextlib import suppress

from tandem.transfer.errors import PeerGone
from tandem.transfer.tcp.frames import DATA_CONNECTIONS

Counts = tuple[int, ...]  # of frames on each data connection, then of posts


class Peer:
    """Shared by the step thread and the threads of this peer's connections, under `lock`.

    Where one connection is lost, all are: nobody knows what of its frames has landed, so that no later signal may. The
    peer stays lost for the rest of the epoch.
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
        self._sockets: list[socket.socket] = []

    def adopt(self, connection: socket.socket) -> None:
        """From now on fail() ends this connection. PeerGone after a loss."""
        with self.lock:
            self.check()
            self._sockets.append(connection)

    def check(self) -> None:
        """PeerGone after a loss. The caller has the lock."""
        if self.failure:
            raise PeerGone(f"PE {self.pe}: {self.failure}")

    def fail(self, reason: str) -> None:
        """Ends all connections; whoever waits for something wakes. Only the first reason stays."""
        with self.lock:
            self.failure = self.failure or reason
            for connection in self._sockets:
                cut(connection)
            self._sockets.clear()
            for waiting in (self.frame_landed, self.progress, self.signals_due, *self.frames_due):
                waiting.notify_all()

    def has_landed(self, counts: Counts) -> bool:
        """Whether the peer says so of all frames and posts that `counts` counts. The caller has the lock."""
        return all(there >= wanted for there, wanted in zip(self.acknowledged, counts, strict=True))


def cut(connection: socket.socket) -> None:
    """Ends what other threads read or write there. Its owner closes it."""
    with suppress(OSError):  # not connected any more
        # Not SSLSocket's own: that would first let a reader take encrypted bytes for plain ones.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
