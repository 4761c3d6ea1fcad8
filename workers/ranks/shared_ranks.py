"""Ranks on the CPUs of one host. Their collectives (sums.c) use shared memory."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.kernels.build.native_build import load_library
from tandem.cache.plan.arrays import Int64Array, address_of
from tandem.cache.plan.shard import Shard
from tandem.workers.errors import NoRanks, RankLost

SOURCE = Path(__file__).with_name("sums.c")
LINE = 64  # bytes of a cache line; the library checks it at its first use
SLOT_BYTES = 1 << 20
WAIT_SECONDS = 60.0  # for a slow rank; one that has ended is noticed sooner
ABORTED, LATE = -1, -2


class _Area(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
    )


def sums_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Returns the bytes of the memory that `size` ranks share for collectives."""
    return LINE * (1 + size) + 2 * size * slot_bytes


def num_entered(memory: Int64Array, rank: int) -> int:
    """How many collectives a rank has begun in this memory. From any thread."""
    return int(memory[LINE // 8 * (1 + rank)])


def end_waits(memory: Int64Array) -> None:
    """Makes all ranks' waits in this memory raise RankLost, now and later. By any rank, from any thread."""
    memory[0] = 1


def failure_word(rank: int) -> int:
    """The index of the word that a rank's GPU kernels set when they give up: ABORTED or LATE."""
    return LINE // 8 * (1 + rank) + 1


def why_failed(memory: Int64Array, rank: int) -> str:
    """Why a rank's GPU kernels gave up; empty while they have not. From any thread."""
    match int(memory[failure_word(rank)]):
        case 0:
            return ""
        case code if code == ABORTED:
            return f"rank {rank} was told to stop waiting for the others"
        case _:
            return f"rank {rank} waited for the others in vain"


class SharedRanks:
    """One rank, owned by one thread. Before attach() it does not wait for others, so one rank can measure a forward."""

    def __init__(self, shard: Shard) -> None:
        """NoRanks where sums.c cannot be built."""
        library = None if shard.size == 1 else load_library(SOURCE)
        if library is None:
            raise NoRanks(f"a worker of {shard.size} ranks needs a C compiler, and what it compiles, on this machine")
        self.rank, self.size = shard.rank, shard.size
        self._sum, self._gather = library.sum_ranks, library.gather_ranks
        area, number, pointer = ctypes.POINTER(_Area), ctypes.c_int64, ctypes.c_void_p
        self._sum.argtypes = (area, number, pointer, number)
        self._gather.argtypes = (area, number, pointer, number, pointer, pointer)
        self._sum.restype = self._gather.restype = number
        self._words: Int64Array | None = None
        self._area = _Area()
        self._exchange = 0
        self._ends: dict[int, Int64Array] = {}

    def attach(self, memory: Int64Array, seconds: float = WAIT_SECONDS, slot_bytes: int = SLOT_BYTES) -> None:
        """memory: sums_bytes() of memory that all ranks share, zeroed by the first. seconds: longest wait for a
        rank."""
        assert memory.nbytes >= sums_bytes(self.size, slot_bytes), "the ranks' memory is too small"
        self._words, self._exchange = memory, 0
        self._area = _Area(address_of(memory), slot_bytes, seconds, self.rank, self.size)

    def detach(self) -> None:
        """Stops using the memory."""
        self._words = None

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        if self._words is None or not x.numel():
            return x
        whole = x.float().contiguous()
        self._exchange = self._checked(self._sum(self._area, self._exchange, whole.data_ptr(), whole.numel()))
        return whole.to(x.dtype)

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """See Ranks."""
        if self._words is None or not x.shape[0]:
            return x.new_zeros((x.shape[0], columns))
        x, out = x.contiguous(), x.new_empty((x.shape[0], columns))
        ends = self._ends.get(columns)
        if ends is None:
            ends = self._ends[columns] = _ends(self.size, columns)
        in_bytes = ends * x.element_size()
        pointers = address_of(in_bytes), out.data_ptr()
        self._exchange = self._checked(self._gather(self._area, self._exchange, x.data_ptr(), x.shape[0], *pointers))
        return out

    def _checked(self, exchange: int) -> int:
        if exchange == ABORTED:
            raise RankLost(f"rank {self.rank} of {self.size} was told to stop waiting for the others")
        if exchange == LATE:
            raise RankLost(f"rank {self.rank} of {self.size} waited {self._area.seconds:g} s for the others")
        return exchange


def _ends(size: int, columns: int) -> Int64Array:
    """Returns 0, then the end of each rank's columns; int64 [size + 1]."""
    ends = [0, *(Shard(rank, size).some("columns", columns).stop for rank in range(size))]
    return torch.tensor(ends, dtype=torch.int64).numpy()
