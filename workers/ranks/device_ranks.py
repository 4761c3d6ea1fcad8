"""Ranks on GPUs of one host. Their collectives (exchange.cu) use memory that all ranks map.

Constants that host and device share are defined here. exchange_defines() passes them to the compiler.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array, address_of
from tandem.cache.plan.shard import Shard
from tandem.transfer.island_ranks import MAX_GPU_RANKS
from tandem.workers.errors import NoRanks, RankLost
from tandem.workers.kernels.cuda.cubin_build import Cubin, defines, load_cubin
from tandem.workers.kernels.cuda.driver import Function, Module
from tandem.workers.ranks.shared_ranks import ABORTED, LATE, failure_word, why_failed

SOURCE = Path(__file__).with_name("exchange.cu")
OLDEST = (9, 0)  # the lowest compute capability that has run these kernels
MOST_BLOCKS = 256  # in one launch
PACKET_BYTES, PACKET_DATA_BYTES = 16, 8
VECTOR_BYTES = 16  # one load or store of a thread
HEADER_BYTES = 8 * MOST_BLOCKS * (2 + MAX_GPU_RANKS)
SLOT_BYTES = 1 << 20  # data bytes of a slot
WHOLE_BYTES = 400 << 10  # largest one-shot all-reduce of more than two ranks; two ranks always use one shot
STREAM_BYTES = 1 << 20  # sums of at least this size are streamed
STREAM_BLOCKS = 256  # the same on all GPUs, since blocks of equal number exchange data; two share a multiprocessor
AHEAD = 1  # rounds that a block sends before it waits, see streams.cuh
LINE_VECTORS = 8  # vectors in 128 bytes
WAIT_SECONDS = 40.0  # longest wait for a slow rank; shorter than the wait for a step's tokens
THREADS = 256
LOOKS = 1 << 14  # polls of a packet between two looks at the clock and the abort word
PAGE_BYTES = 4096  # of host memory, which holds the words of all ranks
PORTABLE, MAPPED = 1, 2  # CU_MEMHOSTREGISTER_…
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def area_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Bytes of each rank's memory that the other ranks map: 28 MiB for 2 ranks, 68 for 4, 106 for 8."""
    packets = 2 * 2 * size * slot_bytes // PACKET_DATA_BYTES
    buffers = STREAM_BLOCKS * (1 if size == 2 else 2) * (size - 1) * (2 * AHEAD + 1)
    return HEADER_BYTES + packets * PACKET_BYTES + buffers * buffer_vectors(size) * VECTOR_BYTES


def kernel_size(size: int) -> int:
    """The most ranks that the streaming kernel for `size` ranks serves."""
    return next(most for most in (2, 4, MAX_GPU_RANKS) if size <= most)


def buffer_vectors(size: int) -> int:
    """Vectors that a block sends to one rank in a round: 16 KiB for two ranks, and less for more."""
    return THREADS * MAX_GPU_RANKS // kernel_size(size)


def exchange_defines() -> tuple[str, ...]:
    """Compiler options with the shared constants, which exchange.cu explains."""
    constants = {"THREADS": THREADS, "LOOKS": LOOKS, "ABORTED": ABORTED, "LATE": LATE, "AHEAD": AHEAD}
    return defines(MAX_GPU_RANKS=MAX_GPU_RANKS, MOST_BLOCKS=MOST_BLOCKS, HEADER=HEADER_BYTES, **constants)


def exchange_cubin(capability: tuple[int, int]) -> Cubin | None:
    """The file to compile for a GPU; None if the GPU is too old."""
    return Cubin(SOURCE, exchange_defines(), "".join(map(str, capability))) if capability >= OLDEST else None


class RanksArgument(ctypes.Structure):
    """The first argument of each kernel."""

    _fields_ = (
        ("areas", ctypes.c_void_p * MAX_GPU_RANKS),
        ("abort", ctypes.c_void_p),
        ("failure", ctypes.c_void_p),
        ("slot_packets", ctypes.c_int64),
        ("buffer_vectors", ctypes.c_int64),
        ("patience", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """The packets of a tensor that one launch sums. whole: each rank sends all packets to all others (one shot)."""

    first: int
    last: int
    whole: bool


def parts_of(num_packets: int, size: int, slot_packets: int, whole_packets: int) -> list[Part]:
    """Splits packets into launches, in order and none empty. whole_packets: the most that are sent whole."""
    whole = size == 2 or num_packets <= whole_packets
    count = -(-num_packets // (slot_packets if whole else slot_packets * size))
    bounds = [num_packets * part // count for part in range(count + 1)]
    return [Part(first, last, whole) for first, last in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Stream:
    """How a tensor is streamed: the number of blocks, each with work, and the vectors of a chunk."""

    blocks: int
    length: int


def stream_of(num_vectors: int, size: int, most_vectors: int, most_blocks: int | None = None) -> Stream:
    """Chooses chunks of at most most_vectors, and as short as the number of rounds allows, so that blocks have about
    equal work. most_blocks: by default STREAM_BLOCKS."""
    most_blocks, chunks = most_blocks or STREAM_BLOCKS, 1 if size == 2 else size  # chunks of a piece
    rounds = -(-num_vectors // (most_blocks * chunks * most_vectors))
    length = -(-num_vectors // (most_blocks * chunks * rounds * LINE_VECTORS)) * LINE_VECTORS
    return Stream(min(most_blocks, -(-num_vectors // (chunks * length))), length)


class DeviceRanks:
    """One rank, owned by one thread. Before attach() it does not wait for others, so one rank can measure a forward.

    A rank whose wait times out sets its failure word and stops its device, so that no token and no KV comes from an
    incomplete sum. The host's next CUDA call fails.
    """

    def __init__(self, shard: Shard) -> None:
        """NoRanks for more ranks than the kernels serve."""
        if shard.size > MAX_GPU_RANKS:
            raise NoRanks(f"a worker has {shard.size} ranks; on GPUs it may have at most {MAX_GPU_RANKS}")
        self.rank, self.size = shard.rank, shard.size
        self._words: Int64Array | None = None
        self._kernels: ExchangeKernels | None = None
        self._argument = RanksArgument()
        self._slot_packets = 0

    def attach(
        self,
        words: Int64Array,
        areas: Sequence[int],
        seconds: float,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """words: see shared_ranks.sums_bytes. areas: addresses of all ranks' zeroed areas of area_bytes(). Both must
        stay valid until detach(). seconds: longest wait for a rank. NoRanks if the kernels cannot be built."""
        assert len(areas) == self.size, "one area for each rank"
        torch.cuda.current_stream().synchronize()  # binds a new thread to the device, as the driver's own calls do not
        kernels = self._kernels = self._kernels or ExchangeKernels()
        host = kernels.register(words)
        self._slot_packets = slot_bytes // PACKET_DATA_BYTES
        self._argument = RanksArgument(
            areas=(ctypes.c_void_p * MAX_GPU_RANKS)(*areas),
            abort=host,
            failure=host + 8 * failure_word(self.rank),
            slot_packets=self._slot_packets,
            buffer_vectors=buffer_vectors(self.size),
            patience=int(seconds * 1e9),
            rank=self.rank,
            size=self.size,
        )
        self._words = words

    def detach(self) -> None:
        """Waits for collectives under way, then stops using the memory."""
        words, self._words = self._words, None
        if words is not None and self._kernels is not None:
            with suppress(RuntimeError):  # a failed device keeps the page until the process ends
                torch.cuda.synchronize()
                self._kernels.unregister(words)

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        kernels = self._ready()
        if kernels is None or not x.numel():
            return x.clone()  # takes as much memory as a sum does
        x = _aligned(x)
        out, numbers = torch.empty_like(x), PACKET_DATA_BYTES // x.element_size()
        if x.nbytes >= STREAM_BYTES and x.nbytes % VECTOR_BYTES == 0:
            kernels.stream(self._argument, x, out)
            return out
        packets, whole = -(-x.numel() // numbers), WHOLE_BYTES // PACKET_DATA_BYTES
        for part in parts_of(packets, self.size, self._slot_packets, whole):
            kernels.sum(self._argument, x, out, part)
        return out

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """See Ranks."""
        kernels, rows = self._ready(), x.shape[0]
        if kernels is None or not rows:
            return x.new_zeros((rows, columns))
        x, out = _aligned(x), x.new_empty((rows, columns))
        widest = -(-columns // self.size) * x.element_size()
        kernels.gather(self._argument, x, out, -(-rows * widest // PACKET_DATA_BYTES // self._slot_packets))
        return out

    def _ready(self) -> "ExchangeKernels | None":
        """The kernels; None before attach(). RankLost once any rank has given up."""
        if self._words is None:
            return None
        if self._words[0]:
            raise RankLost(why_failed(self._words, self.rank) or f"rank {self.rank} was told to stop")
        return self._kernels


class ExchangeKernels:
    """The kernels of exchange.cu for the current device."""

    def __init__(self) -> None:
        """NoRanks if it cannot be built."""
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        planned = exchange_cubin((device.major, device.minor))
        cubin = None if planned is None else load_cubin(planned, "no worker has several ranks")
        if cubin is None:
            raise NoRanks(
                f"a worker of several ranks on GPUs needs nvcc, and GPUs of compute capability {OLDEST[0]}.{OLDEST[1]} "
                f"or later; this one is {device.name}, of {device.major}.{device.minor}"
            )
        self._module, self._blocks = Module(cubin), min(MOST_BLOCKS, device.multi_processor_count)
        streamed = [f"sum_streamed_{most}" for most in (2, 4, MAX_GPU_RANKS)]
        sums = [f"{how}_{name}" for how in ("sum_at_once", "sum_by_parts", *streamed) for name in NAMES.values()]
        self._functions = {
            name: Function(self._module, name, threads=THREADS, shared_bytes=0)
            for name in (*sums, "gather_2", "gather_4")
        }

    def sum(self, ranks: RanksArgument, x: Tensor, out: Tensor, part: Part) -> None:
        name = f"{'sum_at_once' if part.whole else 'sum_by_parts'}_{NAMES[x.dtype]}"
        numbers = (ctypes.c_int64(number) for number in (x.numel(), part.first, part.last))
        self._functions[name].launch(self._blocks, (ranks, *_pointers(x, out), *numbers))

    def stream(self, ranks: RanksArgument, x: Tensor, out: Tensor) -> None:
        """x, out: aligned, and a whole number of vectors long."""
        vectors = x.nbytes // VECTOR_BYTES
        stream = stream_of(vectors, ranks.size, ranks.buffer_vectors)
        numbers = ctypes.c_int64(vectors), ctypes.c_int32(stream.length)
        name = f"sum_streamed_{kernel_size(ranks.size)}_{NAMES[x.dtype]}"
        self._functions[name].launch(stream.blocks, (ranks, *_pointers(x, out), *numbers))

    def gather(self, ranks: RanksArgument, x: Tensor, out: Tensor, parts: int) -> None:
        """parts: the number of launches, each for a part of all rows."""
        rows, columns = out.shape
        for part in range(parts):
            numbers = (ctypes.c_int32(number) for number in (rows, columns, part, parts))
            self._functions[f"gather_{x.element_size()}"].launch(self._blocks, (ranks, *_pointers(x, out), *numbers))

    def register(self, words: Int64Array) -> int:
        """Maps the first page of the host memory, which is page-aligned, and returns its device address."""
        check, host, found = self._module.check, ctypes.c_void_p(address_of(words)), ctypes.c_void_p()
        check("cuMemHostRegister_v2", host, ctypes.c_size_t(PAGE_BYTES), PORTABLE | MAPPED)
        check("cuMemHostGetDevicePointer_v2", ctypes.byref(found), host, 0)
        assert found.value is not None
        return found.value

    def unregister(self, words: Int64Array) -> None:
        self._module.check("cuMemHostUnregister", ctypes.c_void_p(address_of(words)))


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % VECTOR_BYTES == 0 else x.clone()


def _pointers(x: Tensor, out: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    return ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
