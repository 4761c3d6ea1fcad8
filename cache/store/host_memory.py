"""Host memory for copies of pages. A GPU's copy engines can use it once it is pinned."""

import logging
import mmap
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger(__name__)
OS_PAGE = 4096  # shelves are aligned to it, and pieces share none
PIECE_BYTES = 256 << 20
PORTABLE = 1  # cudaHostRegisterPortable


@dataclass(frozen=True)
class Piece:
    """Slots of one shelf that are pinned together: bytes begin … end of all memory. slots: the shelf's slots up to its
    end."""

    shelf: int
    slots: int
    begin: int
    end: int


@dataclass(eq=False)
class Pinning:
    """Progress of the pinning thread, which keeps no tensor alive. setting: see HostMemory. address, num_bytes: of the
    memory. slots: usable slots of each shelf. begun: the address of each pinned piece. error: why it stopped early."""

    setting: str
    address: int
    num_bytes: int
    slots: list[int]
    begun: list[int] = field(default_factory=list)
    error: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, pieces: Sequence[Piece], device: torch.device) -> None:
        torch.cuda.set_device(device)
        cudart, pinned = torch.cuda.cudart(), 0
        assert cudart is not None
        for piece in pieces:
            if self.stop.is_set():
                return
            address, num_bytes = self.address + piece.begin, piece.end - piece.begin
            status = int(cudart.cudaHostRegister(address, num_bytes, PORTABLE))
            with self.changed:
                if status:
                    self.error = (
                        f"{self.setting}: of {self.num_bytes} bytes this host could pin {pinned}; set no more (CUDA "
                        f"error {status})"
                    )
                    log.error("%s", self.error)
                else:
                    pinned += num_bytes
                    self.begun.append(address)
                    self.slots[piece.shelf] = piece.slots
                self.changed.notify_all()
            if status:
                return


class HostMemory:
    """`[num_slots, slot_bytes]` for each shelf, in one mapping that takes no memory before it is used.

    For a GPU, a thread pins it piece by piece during the worker's start and after, all shelves in proportion. torch
    would round the size of pinned memory up to a power of two. The memory stays mapped and pinned as long as any of its
    tensors exists.
    """

    def __init__(self, num_slots: Sequence[int], slot_bytes: Sequence[int], device: torch.device, setting: str) -> None:
        """device: of the pools. setting: the name that errors give to the memory's size. Raises MemoryError if the host
        has less memory."""
        sizes = [-(-count * size // OS_PAGE) * OS_PAGE for count, size in zip(num_slots, slot_bytes, strict=True)]
        begins = np.cumsum([0, *sizes]).tolist()
        mapped = _map(max(begins[-1], 1), setting)
        self.memory = torch.from_numpy(mapped)
        """uint8 [num_bytes]."""
        self.shelves = [
            self.memory[begin : begin + count * size].view(count, size)
            for begin, count, size in zip(begins, num_slots, slot_bytes, strict=False)
        ]
        """uint8 [num_slots, slot_bytes] each."""
        self._pinning = pinning = Pinning(setting, self.memory.data_ptr(), self.memory.numel(), list(num_slots))
        if device.type == "cuda":
            pieces = [
                piece
                for shelf, (begin, *of) in enumerate(zip(begins, num_slots, slot_bytes, strict=False))
                for piece in pieces_of(shelf, begin, *of)
            ]
            pieces.sort(key=lambda piece: piece.slots / num_slots[piece.shelf])
            pinning.slots = [0] * len(sizes)
            thread = threading.Thread(target=pinning.run, args=(pieces, device), name="pin", daemon=True)
            weakref.finalize(mapped, _unpin, thread, pinning)  # all tensors hold this array
            thread.start()

    def await_slot(self, shelf: int, slot: int) -> None:
        """Waits until copies may use a slot. Raises MemoryError if the host could not pin it."""
        pinning = self._pinning
        if slot < pinning.slots[shelf]:
            return
        with pinning.changed:
            pinning.changed.wait_for(lambda: slot < pinning.slots[shelf] or pinning.error)
        if slot >= pinning.slots[shelf]:
            raise MemoryError(pinning.error)

    @property
    def pinned(self) -> tuple[int, ...]:
        """Slots of each shelf that copies may use now."""
        return tuple(self._pinning.slots)

    @property
    def is_pinned(self) -> bool:
        """Returns whether copies may use all slots."""
        return all(pinned == len(shelf) for pinned, shelf in zip(self.pinned, self.shelves, strict=True))


def pieces_of(shelf: int, begin: int, num_slots: int, slot_bytes: int) -> list[Piece]:
    """The pieces of a shelf at byte `begin`. They have whole slots. All but the last end at a page of the system."""
    step = OS_PAGE // gcd(slot_bytes, OS_PAGE)
    each = max(PIECE_BYTES // (slot_bytes * step), 1) * step
    firsts = range(0, num_slots, each)
    slots = [(first, min(first + each, num_slots)) for first in firsts]
    return [
        Piece(shelf, end, begin + first * slot_bytes, begin + -(-end * slot_bytes // OS_PAGE) * OS_PAGE)
        for first, end in slots
    ]


def _map(num_bytes: int, setting: str) -> NDArray[np.uint8]:
    try:
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{setting}: this host has no {num_bytes} bytes left; set fewer: {error}") from error
    mapped.madvise(mmap.MADV_DONTFORK)  # after a fork, copy-on-write would replace the pinned pages
    return np.frombuffer(mapped, np.uint8)


def _unpin(thread: threading.Thread, pinning: Pinning) -> None:
    pinning.stop.set()
    thread.join()
    cudart = torch.cuda.cudart()
    assert cudart is not None
    for address in pinning.begun:
        cudart.cudaHostUnregister(address)
