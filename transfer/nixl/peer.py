"""The work that this PE gives to one other PE, and its progress. The step thread gives work, and the exchange's thread
carries it out."""

import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.transfer.errors import PeerGone, TransportError, TransportTimeout

SLOTS = 16  # of a ring: copies that a peer has not sorted in yet; a writer of more waits
NOTE = struct.Struct("<BxxxIqqQ")


class Kind(IntEnum):
    POST = 1  # row, signal, payload: a row of the receiver's mailbox
    STAGED = 2  # row, payload: the slot of the ring to be sorted in, and its bytes
    LANDED = 3  # number: how many notes of the receiver have landed; also the sign of life


@dataclass(frozen=True, eq=False)
class Note:
    """A message. payload: a tensor [] on the host once its item is ready."""

    kind: Kind
    row: int = 0
    signal: int = 0
    payload: int | Tensor = 0

    def pack(self, number: int) -> bytes:
        """number: counts the sender's notes of the first two kinds from 1."""
        return NOTE.pack(self.kind, self.row, self.signal, int(self.payload), number)

    @staticmethod
    def unpack(data: bytes) -> tuple["Note", int]:
        """The note and its number. TransportError unless a PE could have sent it."""
        if len(data) != NOTE.size or data[0] not in tuple(Kind):
            raise TransportError(f"a note has {len(data)} bytes and kind {data[:1].hex()}; it must have {NOTE.size}")
        kind, row, signal, payload, number = NOTE.unpack(data)
        return Note(Kind(kind), row, signal, payload), number


@dataclass(frozen=True, eq=False)
class Spans:
    """Memory of one side. spans: uint64 [n, 3], address, bytes and device of each. memory: DRAM or VRAM."""

    memory: str
    spans: NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Item:
    """A write, or a note, or a note after a write. It begins when `ready` has come, which is a GPU's event.

    Writes of several items are under way at once. A note is sent when all items before it are done.
    """

    ready: torch.cuda.Event | None = None
    source: Spans | None = None
    target: Spans | None = None
    note: Note | None = None


class Peer:
    """Shared by both threads, under `lock`. A lost one stays lost: another process in its place is another Peer."""

    def __init__(self, pe: int) -> None:
        self.pe = pe
        self.lock = threading.Lock()
        self.progress = threading.Condition(self.lock)  # something is done or acknowledged
        self.waiting: deque[Item] = deque()  # only the exchange takes from it
        self.given = 0  # items
        self.done = 0
        self.notes = 0  # among the items given
        self.acknowledged = 0  # of those, what the peer says has landed there
        self.landed = 0  # notes of the peer, here
        self.failure = ""
        self.is_over = False  # whether it was cut: nothing is under way any more
        self._slot_notes = [0] * SLOTS
        self._staged = 0

    def give(self, item: Item) -> None:
        """Queues an item. PeerGone after a loss."""
        with self.lock:
            self.check()
            self.given += 1
            self.notes += item.note is not None
            if item.note is not None and item.note.kind == Kind.STAGED:
                self._slot_notes[item.note.row] = self.notes
            self.waiting.append(item)

    def free_slot(self, seconds: float) -> int:
        """The next slot of the ring, once the peer has sorted in what it held. PeerGone, TransportTimeout."""
        deadline = time.monotonic() + seconds
        with self.lock:
            slot = self._staged % SLOTS
            while not self.failure and self.acknowledged < self._slot_notes[slot]:
                if not self.progress.wait(deadline - time.monotonic()):
                    raise TransportTimeout(
                        f"PE {self.pe} has taken nothing for {seconds:g} s; what was written before may still land"
                    )
            self.check()
            self._staged += 1
            return slot

    def check(self) -> None:
        """Raises PeerGone after a loss. The caller has the lock."""
        if self.failure:
            raise PeerGone(f"PE {self.pe}: {self.failure}")

    def end(self, reason: str) -> None:
        """Fails the peer as fail() does, once nothing is under way any more. Fences are quiet then."""
        self.fail(reason)
        with self.lock:
            self.is_over = True
            self.progress.notify_all()

    def fail(self, reason: str) -> None:
        """Wakes all threads that wait. Only the first reason stays."""
        with self.lock:
            self.failure = self.failure or reason
            self.waiting.clear()
            self.progress.notify_all()


class NixlFence:
    """A fence after items and notes that were given to a peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        with peer.lock:
            self._given, self._notes = peer.given, peer.notes

    def is_quiet(self) -> bool:
        with self.peer.lock:
            return self.has_landed()

    def has_landed(self) -> bool:
        """Does what is_quiet() does, for a caller that has the peer's lock."""
        if self.peer.is_over or (self.peer.done >= self._given and self.peer.acknowledged >= self._notes):
            return True
        self.peer.check()
        return False
