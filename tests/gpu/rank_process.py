"""Ranks of one worker in processes of their own, on GPUs that they may share, and what is asked of them."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.shard import Shard
from tandem.transfer.membership import TransportConfig
from tandem.workers.errors import RankLost
from tandem.workers.ranks import device_ranks
from tandem.workers.ranks.areas import Areas
from tandem.workers.ranks.device_ranks import DeviceRanks, area_bytes
from tandem.workers.ranks.rank_memory import RankMemory, attach_memory, create_memory
from tests.gpu.pe_process import PeProcess, finish_all, gpu_of, together
from tests.transfer.layouts import two_groups

RING, ROWS = 4096, 4
NEVER = 1 << 40
# WHOLE_BYTES and STREAM_BYTES of device_ranks.py that choose an algorithm. By parts each rank needs a packet at least.
ALGORITHMS = {"at once": (NEVER, NEVER), "by parts": (64, NEVER), "streamed": (NEVER, 0)}
Shape = tuple[int, int]


class RankPe:
    """See Pe: every public method can be called by name."""

    def __init__(self, pe: int) -> None:
        self.pe = pe
        torch.cuda.set_device(gpu_of(pe))

    def open(self, config: TransportConfig) -> tuple[bytes, bytes]:
        """Returns the transport's handle and, on rank 0, the handle of the words in the host's memory."""
        from tandem.transfer.nvshmem.transport import NvshmemTransport

        self._size, self._words = config.num_pes, b""
        self.transport = NvshmemTransport(config)
        if self.pe == 0:
            self.memory, _, self._words = create_memory(*self._extent)
        return self.transport.open(), self._words

    def join(self, handles: list[bytes], words: bytes, slot_bytes: int, seconds: list[float]) -> None:
        """seconds: longest wait of each rank."""
        self.transport.join(handles)
        if self.pe:
            self.memory: RankMemory = attach_memory(words, *self._extent)
        self.ranks = DeviceRanks(Shard(self.pe, self._size))
        areas = [self.transport.scratch(pe) for pe in range(self._size)]
        assert None not in areas
        self.ranks.attach(self.memory.sums, areas, seconds[self.pe], slot_bytes)  # type: ignore[arg-type]

    def leave(self) -> None:
        self.ranks.detach()
        self.transport.close()

    def choose(self, algorithm: str, stream_blocks: int = device_ranks.STREAM_BLOCKS) -> None:
        """One of ALGORITHMS for all sums from now on."""
        device_ranks.WHOLE_BYTES, device_ranks.STREAM_BYTES = ALGORITHMS[algorithm]
        device_ranks.STREAM_BLOCKS = stream_blocks

    def sums(self, shapes: Sequence[Shape], dtype: torch.dtype) -> list[np.ndarray]:
        """Returns the sums of parts of these shapes."""
        parts = [part(self.pe, seed, shape, dtype).cuda() for seed, shape in enumerate(shapes)]
        return [bits(one) for one in [self.ranks.sum(one) for one in parts]]

    def gathered(self, shapes: Sequence[Shape], dtype: torch.dtype) -> list[np.ndarray]:
        """Gathers parts of these shapes from all ranks, each of which has random numbers."""
        parts = [columns_of(self.pe, self._size, seed, shape, dtype).cuda() for seed, shape in enumerate(shapes)]
        return [bits(self.ranks.gather(one, shape[1])) for one, shape in zip(parts, shapes, strict=True)]

    def replays(self, shape: Shape, dtype: torch.dtype, count: int) -> list[np.ndarray]:
        """Replays one CUDA graph, which sums and then gathers, with other numbers each time."""
        x = torch.zeros(shape, dtype=dtype, device="cuda")
        columns = Shard(self.pe, self._size).some("columns", shape[1])

        def compute() -> Tensor:
            self.ranks.sum(x)  # more epochs a replay
            summed = self.ranks.sum(x)
            return self.ranks.gather(summed[:, columns.start : columns.stop], shape[1])

        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = compute()
        found = []
        for seed in range(count):
            x.copy_(part(self.pe, seed, shape, dtype))
            graph.replay()
            found.append(bits(out))
        return found

    def sum_in_vain(self) -> tuple[str, str, str, float]:
        """Returns the device's report, the text of the words, the next sum's error, and seconds."""
        begin = time.monotonic()
        try:
            self.ranks.sum(torch.ones(4, 4, device="cuda"))
            torch.cuda.synchronize()
            reported = ""
        except RuntimeError as error:
            reported = str(error)
        seconds = time.monotonic() - begin
        try:
            self.ranks.sum(torch.empty(4, 4))
            raised = ""
        except RankLost as error:
            raised = str(error)
        return reported, self.memory.why_failed(self.pe), raised, seconds

    def seconds_each(self, num_bytes: int, count: int, repeats: int) -> float:
        """The median of a sum in a CUDA graph of so many, of bfloat16."""
        x = torch.zeros(1, num_bytes // 2, dtype=torch.bfloat16, device="cuda")

        def compute() -> None:
            for _ in range(count):
                self.ranks.sum(x)

        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            compute()
        taken = []
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1000 / count)
        return statistics.median(taken)

    @property
    def _extent(self) -> tuple[int, int, int, int]:
        return self._size, self._size, ROWS, RING


class PeWithoutMapping(RankPe):
    """Its ranks have no transport that maps memory, and meet in their own."""

    def open(self, config: TransportConfig) -> tuple[bytes, bytes]:
        self._size, self._words = config.num_pes, b""
        if self.pe == 0:
            self.memory, _, self._words = create_memory(*self._extent)
        return b"", self._words

    def join(self, handles: list[bytes], words: bytes, slot_bytes: int, seconds: list[float]) -> None:
        if self.pe:
            self.memory = attach_memory(words, *self._extent)
        self.ranks = DeviceRanks(Shard(self.pe, self._size))
        torch.cuda.current_stream().synchronize()  # binds this thread to the device
        self._areas = Areas()
        areas = self._areas.open(self.memory, self.pe, area_bytes(self._size, slot_bytes), 60.0)
        self.ranks.attach(self.memory.sums, areas, seconds[self.pe], slot_bytes)

    def leave(self) -> None:
        self.ranks.detach()
        self._areas.close()


@contextmanager
def meeting(processes: list[PeProcess], slot_bytes: int, seconds: list[float] | None = None) -> Iterator[None]:
    """They meet as the ranks of one worker. seconds: longest wait of each; given, they do not part at the end."""
    size, layout = len(processes), two_groups(torch.bfloat16)
    config = TransportConfig(
        0, size, layout, (4, 4), num_signals=ROWS, island="ranks", epoch=1, scratch_bytes=area_bytes(size, slot_bytes)
    )
    for process in processes:
        process.begin("open", replace(config, pe=process.pe))
    opened = finish_all(processes)
    handles, words = [handle for handle, _ in opened], opened[0][1]
    together(processes, "join", handles, words, slot_bytes, seconds or [60.0] * size)
    yield
    if seconds is None:
        together(processes, "leave")


def part(rank: int, seed: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def columns_of(rank: int, size: int, seed: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    columns = Shard(rank, size).some("columns", shape[1])
    return part(rank, seed, (shape[0], len(columns)), dtype)


def sum_of(size: int, seed: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Sums in float32 in the order of ranks."""
    total = part(0, seed, shape, dtype).float()
    for rank in range(1, size):
        total = total + part(rank, seed, shape, dtype).float()
    return total.to(dtype)


def bits(values: Tensor) -> np.ndarray:
    return values.cpu().contiguous().view(torch.uint8).numpy()
