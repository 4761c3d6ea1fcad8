"""Sums and gatherings of processes, against the plain ones; and ranks that are told to end, late or killed."""

import mmap
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.plan.shard import Shard
from tandem.workers.errors import RankLost
from tandem.workers.ranks.shared_ranks import SharedRanks, end_waits, sums_bytes

SLOT = 4096  # bytes, so that large tensors take several exchanges
FORK = get_context("fork")
Body = Callable[[SharedRanks], Any]


def run(size: int, body: Body, seconds: float = 30.0) -> list[Any]:
    """Returns what body returns on each of so many ranks, or the error that it raises."""
    memory = mmap.mmap(-1, sums_bytes(size, SLOT))
    pipes = [FORK.Pipe(duplex=False) for _ in range(size)]

    def child(rank: int, pipe: Connection) -> None:
        torch.set_num_threads(1)
        ranks = SharedRanks(Shard(rank, size))
        ranks.attach(np.frombuffer(memory, np.int64), seconds, SLOT)
        try:
            found = body(ranks)
        except RankLost as error:
            found = error
        pipe.send(found)

    children = [FORK.Process(target=child, args=(rank, pipe)) for rank, (_, pipe) in enumerate(pipes)]
    for one in children:
        one.start()
    for _, sending in pipes:
        sending.close()
    found = []
    for receiving, _ in pipes:
        try:
            found.append(receiving.recv() if receiving.poll(60) else None)
        except EOFError:
            found.append(None)
    for one in children:
        one.join(10)
        assert one.exitcode is not None, "a rank hangs"
    return found


def part(rank: int, seed: int, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype)


SHAPES = [(1, 1), (3, 7), (64, 33), (1, 5000), (200, 37)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_in_float32_in_the_order_of_ranks(size: int, dtype: torch.dtype) -> None:
    def body(ranks: SharedRanks) -> list[np.ndarray[Any, Any]]:
        sums = [ranks.sum(part(ranks.rank, seed, shape, dtype)) for seed, shape in enumerate(SHAPES * 5)]
        return [one.float().numpy() for one in sums]

    found = run(size, body)
    for seed, shape in enumerate(SHAPES * 5):
        expected = part(0, seed, shape, dtype).float()
        for rank in range(1, size):
            expected = expected + part(rank, seed, shape, dtype).float()
        for one in found:
            np.testing.assert_array_equal(one[seed], expected.to(dtype).float().numpy())


@pytest.mark.parametrize("size", [2, 3])
def test_columns_of_unlike_numbers_are_gathered(size: int) -> None:
    def body(ranks: SharedRanks) -> list[np.ndarray[Any, Any]]:
        shard = Shard(ranks.rank, size)
        return [
            ranks.gather(part(ranks.rank, rows, (rows, len(shard.some("columns", columns)))), columns).numpy()
            for rows, columns in ((1, 3), (5, 199), (70, 64), (0, 9))
        ]

    found = run(size, body)
    for one in found[1:]:
        for mine, other in zip(found[0], one, strict=True):
            np.testing.assert_array_equal(mine, other)
    for at, (rows, columns) in enumerate(((1, 3), (5, 199), (70, 64))):
        ranges = [Shard(rank, size).some("columns", columns) for rank in range(size)]
        expected = torch.cat([part(rank, rows, (rows, len(one))) for rank, one in enumerate(ranges)], 1)
        np.testing.assert_array_equal(found[0][at], expected.numpy())


def test_a_rank_by_itself_changes_nothing() -> None:
    x = torch.ones(2, 3)
    assert torch.equal(SharedRanks(Shard(0, 2)).sum(x), x)


def test_a_rank_that_waits_is_told_to_stop() -> None:
    def body(ranks: SharedRanks) -> None:
        if ranks.rank == 0:
            time.sleep(0.2)
            assert ranks._words is not None
            end_waits(ranks._words)
        else:
            ranks.sum(torch.ones(1, 1))

    _, found = run(2, body)
    assert isinstance(found, RankLost)
    assert "rank 1 of 2 was told to stop waiting for the others" in str(found)


def test_a_killed_rank_is_waited_for_within_bounds() -> None:
    def body(ranks: SharedRanks) -> None:
        ranks.sum(torch.ones(4, 4))
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.sum(torch.ones(4, 4))

    found = run(2, body, seconds=0.5)
    assert isinstance(found[0], RankLost)
    assert "rank 0 of 2 waited 0.5 s for the others" in str(found[0])
