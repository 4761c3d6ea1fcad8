"""Sums and gatherings among GPUs, bit for bit; waits that end. The ranks may share a GPU, and then take turns there."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.gpu.pe_process import NEEDS_NVSHMEM, PeProcess, pe_processes, together
from tests.gpu.rank_process import ALGORITHMS, RankPe, Shape, bits, columns_of, meeting, sum_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), NEEDS_NVSHMEM]

SLOT = 64 << 10  # bytes, so that the largest take several launches
SHAPES: list[Shape] = [(1, 1), (3, 7), (1, 4096), (64, 2048), (5, 333), (700, 1024), (2, 5)]
FEW_BLOCKS = 16  # of streamed sums, so that the largest take several rounds


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeProcess]]:
    with pe_processes(4, RankPe) as started:
        yield started


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, processes: list[PeProcess]) -> Iterator[list[PeProcess]]:
    with meeting(processes[: request.param], SLOT):
        yield processes[: request.param]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_are_in_float32_in_the_order_of_ranks(ranks: list[PeProcess], dtype: torch.dtype, algorithm: str) -> None:
    together(ranks, "choose", algorithm, FEW_BLOCKS)
    check_sums(ranks, SHAPES, dtype)


def test_large_sums_are_streamed_by_all_blocks(ranks: list[PeProcess]) -> None:
    together(ranks, "choose", "streamed")
    check_sums(ranks, [(2048, 4096), (2049, 4096), (8, 4096)], torch.bfloat16)


def check_sums(ranks: list[PeProcess], shapes: list[Shape], dtype: torch.dtype) -> None:
    found = together(ranks, "sums", shapes, dtype)
    for seed, shape in enumerate(shapes):
        due = bits(sum_of(len(ranks), seed, shape, dtype))
        for one in found:
            np.testing.assert_array_equal(one[seed], due)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_columns_of_unlike_numbers_are_gathered(ranks: list[PeProcess], dtype: torch.dtype) -> None:
    size, shapes = len(ranks), [(1, 5), (3, 333), (64, 151), (9, 15_001), (64, 4096)]
    for one in together(ranks, "gathered", shapes, dtype):
        for seed, shape in enumerate(shapes):
            due = torch.cat([columns_of(rank, size, seed, shape, dtype) for rank in range(size)], 1)
            np.testing.assert_array_equal(one[seed], bits(due))


@pytest.mark.parametrize(("algorithm", "shape"), [("at once", (5, 1023)), ("streamed", (512, 1024))])
def test_a_graph_is_replayed_with_other_numbers(ranks: list[PeProcess], algorithm: str, shape: Shape) -> None:
    together(ranks, "choose", algorithm, FEW_BLOCKS)
    for one in together(ranks, "replays", shape, torch.bfloat16, 20):
        for seed, found in enumerate(one):
            np.testing.assert_array_equal(found, bits(sum_of(len(ranks), seed, shape, torch.bfloat16)))


@pytest.mark.parametrize("algorithm", ["at once", "streamed"])
def test_a_rank_that_never_comes_ends_the_waits_of_all(algorithm: str) -> None:
    with pe_processes(3, RankPe) as processes, meeting(processes, SLOT, [60.0, 2.0, 60.0]):
        waiting = processes[:2]
        together(waiting, "choose", algorithm)
        (told, late) = together(waiting, "sum_in_vain")
        for process in processes:
            process._process.kill()  # a device that has failed takes its process along
    for reported, _, raised, seconds in (told, late):
        assert "launch failure" in reported
        assert raised
        assert seconds < 30
    assert told[1] == "rank 0 was told to stop waiting for the others"
    assert late[1] == "rank 1 waited for the others in vain"
    assert late[3] >= 2
