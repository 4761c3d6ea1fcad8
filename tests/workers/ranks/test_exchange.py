"""exchange.cu on a CPU, threads for each rank: sums bit for bit in the order of ranks, gatherings, waits that end."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.shard import Shard
from tandem.transfer.island_ranks import MAX_GPU_RANKS
from tandem.workers.ranks.device_ranks import (
    NAMES,
    PACKET_DATA_BYTES,
    SOURCE,
    STREAM_BLOCKS,
    VECTOR_BYTES,
    RanksArgument,
    area_bytes,
    exchange_defines,
    kernel_size,
    parts_of,
    stream_of,
)
from tandem.workers.ranks.shared_ranks import end_waits, failure_word, sums_bytes, why_failed
from tests.support.thread_ranks import on_all
from tests.workers.kernels.emulated.library import COMPILER, library_builder

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
EMULATED = Path(__file__).with_name("exchange.cpp")
SLOT = 256  # bytes of data: large tensors take several launches
BLOCKS = 3
BUFFER = 16  # vectors: a chunk of a streamed sum


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    build = library_builder(EMULATED, tmp_path_factory.mktemp("exchange"))
    return build((*exchange_defines(), f"-I{SOURCE.parent}"))


class World:
    """Areas and words of so many ranks, and each rank's argument."""

    def __init__(self, library: ctypes.CDLL, size: int, seconds: float = 60.0) -> None:
        self.library, self.size = library, size
        self.areas = [np.zeros(area_bytes(size, SLOT) // 8 + 2, np.int64) for _ in range(size)]
        self.words = np.zeros(sums_bytes(size, SLOT) // 8, np.int64)
        areas, words = [-(-area.ctypes.data // 16) * 16 for area in self.areas], self.words.ctypes.data
        self.arguments = [
            RanksArgument(
                areas=(ctypes.c_void_p * MAX_GPU_RANKS)(*areas),
                abort=words,
                failure=words + 8 * failure_word(rank),
                slot_packets=SLOT // PACKET_DATA_BYTES,
                buffer_vectors=BUFFER,
                patience=int(seconds * 1e9),
                rank=rank,
                size=size,
            )
            for rank in range(size)
        ]

    def sum(self, rank: int, x: Tensor, whole_packets: int) -> Tensor | None:
        """None: the rank gave up."""
        out, packets = torch.empty_like(x), -(-x.numel() * x.element_size() // PACKET_DATA_BYTES)
        for part in parts_of(packets, self.size, SLOT // PACKET_DATA_BYTES, whole_packets):
            name = f"run_{'sum_at_once' if part.whole else 'sum_by_parts'}_{NAMES[x.dtype]}"
            if not self._run(name, BLOCKS, rank, x, out, *map(ctypes.c_int64, (x.numel(), part.first, part.last))):
                return None
        return out

    def stream(self, rank: int, x: Tensor) -> Tensor | None:
        """The same of a tensor of whole vectors."""
        out, vectors = torch.empty_like(x), x.nbytes // VECTOR_BYTES
        stream = stream_of(vectors, self.size, BUFFER, BLOCKS)
        name = f"run_sum_streamed_{kernel_size(self.size)}_{NAMES[x.dtype]}"
        numbers = ctypes.c_int64(vectors), ctypes.c_int32(stream.length)
        return out if self._run(name, stream.blocks, rank, x, out, *numbers) else None

    def gather(self, rank: int, x: Tensor, columns: int, parts: int) -> Tensor:
        out = x.new_empty(x.shape[0], columns)
        for part in range(parts):
            assert self._run(f"run_gather_{x.element_size()}", BLOCKS, rank, x, out, x.shape[0], columns, part, parts)
        return out

    def _run(self, name: str, blocks: int, rank: int, x: Tensor, out: Tensor, *numbers: Any) -> bool:
        run = getattr(self.library, name)
        run.restype = ctypes.c_bool
        pointers = map(ctypes.c_void_p, (x.data_ptr(), out.data_ptr()))
        return run(blocks, ctypes.byref(self.arguments[rank]), *pointers, *numbers)


def on_ranks(size: int, call: Callable[[int], Any]) -> list[Any]:
    return on_all([lambda rank=rank: call(rank) for rank in range(size)])


def part(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def sum_of(size: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sums all ranks' part(), in float32 in the order of ranks."""
    total = part(0, seed, shape, dtype).float()
    for rank in range(1, size):
        total = total + part(rank, seed, shape, dtype).float()
    return total.to(dtype)


def shapes() -> Iterator[tuple[int, tuple[int, ...]]]:
    """Numbers that end within a packet, fill slots and take several launches; among them small ones."""
    return enumerate([(1, 1), (3, 7), (64,), (5, 333), (2,), (1, 1024), (7, 11)] * 3)


@pytest.mark.gate("2-*", "3-torch.bfloat16-by-parts")
@pytest.mark.parametrize("whole_packets", [0, 1 << 20], ids=["by-parts", "at-once"])
@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_float32_in_the_order_of_ranks(
    library: ctypes.CDLL, size: int, dtype: torch.dtype, whole_packets: int
) -> None:
    world, least = World(library, size), max(whole_packets, size)  # by parts each rank has a packet at least

    def body(rank: int) -> list[Tensor | None]:
        return [world.sum(rank, part(rank, seed, shape, dtype), least) for seed, shape in shapes()]

    found = on_ranks(size, body)
    for seed, shape in shapes():
        due = sum_of(size, seed, shape, dtype)
        assert all(torch.equal(one[seed], due) for one in found)


@pytest.mark.gate("2-torch.bfloat16", "2-torch.float32", "3-torch.bfloat16", "4-torch.float16")
@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_streamed_sums_have_the_same_bits(library: ctypes.CDLL, size: int, dtype: torch.dtype) -> None:
    """Launch after launch, by ranks that are each slow at other places. Sums of packets stand between them."""
    world, vectors = World(library, size), VECTOR_BYTES // dtype.itemsize
    chunks = BLOCKS * (1 if size == 2 else size)  # of one round of all blocks
    counts = [1, 7, 8, 9, BUFFER, BUFFER + 1, chunks * BUFFER - 1, chunks * BUFFER, chunks * BUFFER + 1]
    counts += [2 * chunks * BUFFER + 5, 7 * chunks * BUFFER, 3, 4 * chunks * BUFFER + BUFFER, chunks * 8 + 1]
    cases = list(enumerate([(count, vectors) for count in counts * 2]))

    def body(rank: int) -> list[tuple[Tensor | None, ...]]:
        library.be_uneven(rank + 1)
        parts = [part(rank, seed, shape, dtype) for seed, shape in cases]
        return [(world.stream(rank, one), world.sum(rank, one[:4], 1 << 20)) for one in parts]

    for one in on_ranks(size, body):
        for (seed, shape), (streamed, sent) in zip(cases, one, strict=True):
            due = sum_of(size, seed, shape, dtype)
            assert torch.equal(streamed, due)
            assert torch.equal(sent, due[:4])


@pytest.mark.parametrize("size", [2, 3])
def test_a_streamed_sum_ends_when_a_rank_does(library: ctypes.CDLL, size: int) -> None:
    world, x = World(library, size, seconds=0.2), torch.ones(4 * BLOCKS * size * BUFFER, 4)

    def body(rank: int) -> list[bool]:
        return [world.stream(rank, x) is not None for _ in range(2 if rank == size - 1 else 3)]

    assert on_ranks(size, body) == [[True, True, False]] * (size - 1) + [[True, True]]
    reasons = [why_failed(world.words, rank) for rank in range(size)]
    assert any("in vain" in one for one in reasons)
    assert all(reasons[:-1])
    assert reasons[-1] == ""


def test_a_rank_that_waits_in_a_streamed_sum_is_told_to_stop(library: ctypes.CDLL) -> None:
    world = World(library, 2)
    threading.Timer(0.1, end_waits, (world.words,)).start()
    assert world.stream(0, torch.ones(BUFFER, 4)) is None
    assert why_failed(world.words, 0) == "rank 0 was told to stop waiting for the others"


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_blocks_have_about_as_many_rounds(size: int) -> None:
    chunks, most = 1 if size == 2 else size, 512
    for vectors in (1, 100, 65_536, 65_537, 524_288, 999_999, 4_194_304):
        stream = stream_of(vectors, size, most)
        pieces = -(-vectors // (chunks * stream.length))
        assert stream.blocks == min(STREAM_BLOCKS, pieces)
        assert 0 < stream.length <= most
        assert stream.length % 8 == 0
        assert -(-pieces // STREAM_BLOCKS) == -(-vectors // (STREAM_BLOCKS * chunks * most))
    assert stream_of(65_536, 2, 1024).length == 256  # 1 MiB: each block has some of it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_columns_of_unlike_numbers_are_gathered(library: ctypes.CDLL, size: int, dtype: torch.dtype) -> None:
    world, cases = World(library, size), [(1, 3), (5, 33), (3, 64), (2, 401), (4, 8)]

    def own(rank: int, seed: int) -> Tensor:
        rows, columns = cases[seed]
        return part(rank, seed, (rows, len(Shard(rank, size).some("columns", columns))), dtype)

    def body(rank: int) -> list[Tensor]:
        def parts(rows: int, columns: int) -> int:
            return -(-rows * -(-columns // size) * dtype.itemsize // SLOT)

        return [world.gather(rank, own(rank, seed), case[1], parts(*case)) for seed, case in enumerate(cases)]

    for found in on_ranks(size, body):
        for seed, one in enumerate(found):
            assert torch.equal(one, torch.cat([own(rank, seed) for rank in range(size)], 1))


def test_a_rank_that_waits_is_told_to_stop(library: ctypes.CDLL) -> None:
    world = World(library, 2)
    threading.Timer(0.1, end_waits, (world.words,)).start()
    assert world.sum(0, torch.ones(4), 8) is None
    assert why_failed(world.words, 0) == "rank 0 was told to stop waiting for the others"
    assert why_failed(world.words, 1) == ""


def test_a_rank_that_waits_in_vain_ends_all_waits(library: ctypes.CDLL) -> None:
    world = World(library, 3, seconds=0.2)
    assert on_ranks(2, lambda rank: world.sum(rank, torch.ones(40), 64)) == [None, None]
    reasons = [why_failed(world.words, rank) for rank in range(3)]
    assert any("in vain" in one for one in reasons)
    assert all(reasons[:2])
    assert world.words[0] == 1


def test_a_tensor_is_cut_into_slots() -> None:
    assert [(one.first, one.last) for one in parts_of(10, 4, 3, 100)] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    parts = parts_of(1000, 4, 32, 100)
    assert [one.whole for one in parts] == [False] * 8
    assert all(-(-(one.last - one.first) // 4) <= 32 for one in parts)
    assert parts[0].first == 0
    assert parts[-1].last == 1000
