"""The sending ends of the connections to one peer: a thread each, which owns its connection."""

import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import closing

from tandem.transfer.errors import PeerGone, TransportTimeout
from tandem.transfer.tcp.frames import DATA_CONNECTIONS, Frame, FramePart, Kind, SignalFrame
from tandem.transfer.tcp.peer import Counts, Peer

MAX_STAGED_BYTES = 64 << 20  # of copies that wait to be sent to one peer; who writes more waits
END_SECONDS = 10.0
BUFFERS = 512  # of one call; Linux takes 1024


class Sender:
    """All that goes to one peer. The step thread gives; a connection's thread sends, in the order given."""

    def __init__(self, peer: Peer, connections: Sequence[socket.socket]) -> None:
        """connections: DATA_CONNECTIONS for data, then one for signals."""
        self.peer = peer
        self._queues: list[deque[Frame]] = [deque() for _ in range(DATA_CONNECTIONS)]
        self._waiting = [0] * DATA_CONNECTIONS  # bytes that each has yet to send
        self._staged = 0
        self._posts: deque[SignalFrame] = deque()
        *data, signals = connections
        self.threads = [
            threading.Thread(target=self._send_frames, args=(number, one), name=f"tcp-{peer.pe}-{number}", daemon=True)
            for number, one in enumerate(data)
        ]
        self.threads.append(
            threading.Thread(target=self._send_signals, args=(signals,), name=f"tcp-{peer.pe}-signals", daemon=True)
        )
        for thread in self.threads:
            thread.start()

    def give(self, frames: Iterable[Frame], seconds: float) -> None:
        """Frames to be sent, each on the connection with the least to do.

        PeerGone; TransportTimeout when too many copies have waited for so long.
        """
        peer, deadline = self.peer, time.monotonic() + seconds
        for frame in frames:
            with peer.lock:
                while not peer.failure and frame.staged and self._staged >= MAX_STAGED_BYTES:
                    if not peer.progress.wait(deadline - time.monotonic()):
                        raise TransportTimeout(
                            f"PE {peer.pe} has taken nothing for {seconds:g} s; what was written before may still land"
                        )
                peer.check()
                number = min(range(DATA_CONNECTIONS), key=self._waiting.__getitem__)
                self._queues[number].append(frame)
                self._waiting[number] += frame.num_bytes
                self._staged += frame.staged
                peer.given[number] += 1
                peer.frames_due[number].notify()

    def post(self, row: int, signal: int, payload: int) -> None:
        """A row of the peer's mailbox, after all that was given before. PeerGone."""
        peer = self.peer
        with peer.lock:
            peer.check()
            self._posts.append(SignalFrame(Kind.POST, row, signal, payload, tuple(peer.given)))
            peer.given[DATA_CONNECTIONS] += 1
            peer.signals_due.notify()

    def join(self) -> None:
        """Waits for the sending threads after the peer was lost. When this returns, they read no page any more.
        TransportTimeout."""
        for thread in self.threads:
            thread.join(END_SECONDS)
            if thread.is_alive():
                raise TransportTimeout(f"{thread.name} did not end within {END_SECONDS:g} s")

    def _send_frames(self, number: int, connection: socket.socket) -> None:
        peer, queue = self.peer, self._queues[number]
        with closing(connection):
            try:
                while True:
                    with peer.lock:
                        peer.frames_due[number].wait_for(lambda: queue or peer.failure)
                        peer.check()
                        frame = queue.popleft()
                    send_parts(connection, frame.parts)
                    with peer.lock:
                        self._waiting[number] -= frame.num_bytes
                        self._staged -= frame.staged
                        peer.progress.notify_all()
                    del frame
            except PeerGone:
                queue.clear()
            except OSError as error:
                peer.fail(f"the connection to it is lost: {error}")

    def _send_signals(self, connection: socket.socket) -> None:
        """Sends posts, and what has landed here since the last report."""
        peer, said = self.peer, (0,) * (DATA_CONNECTIONS + 1)
        with closing(connection):
            try:
                while True:
                    with peer.lock:
                        while not (self._posts or said != tuple(peer.landed) or peer.failure):
                            peer.signals_due.wait()
                        peer.check()
                        frames = [*self._posts]
                        self._posts.clear()
                        landed: Counts = tuple(peer.landed)
                    if landed != said:
                        frames.append(SignalFrame(Kind.LANDED, 0, 0, 0, landed))
                        said = landed
                    connection.sendall(b"".join(frame.pack() for frame in frames))
            except PeerGone:
                pass
            except OSError as error:
                peer.fail(f"the connection to it is lost: {error}")


def send_parts(connection: socket.socket, parts: Sequence[FramePart]) -> None:
    """All parts, straight from where they are; with TLS each is encrypted as it is read."""
    if isinstance(connection, ssl.SSLSocket):
        for part in parts:
            connection.sendall(part)
        return
    waiting = [memoryview(part) for part in parts]
    first = 0
    while first < len(waiting):
        sent = connection.sendmsg(waiting[first : first + BUFFERS])
        while sent and sent >= len(waiting[first]):
            sent -= len(waiting[first])
            first += 1
        if sent:
            waiting[first] = waiting[first][sent:]
