"""Workers of several ranks in one elastic island: they die, come back, leave and join, while the others keep their
streams."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.e2e.test_elastic import OVERRIDES, STREAMS, Streams, expected, scale, whole, workers
from tests.support.local_processes import LocalProcesses
from tests.support.steady_steps import STEADY
from tests.support.transports import skip_without
from tests.support.waiting import until

__all__ = ["expected"]  # a fixture

PREFILL, DECODE = 0, 1  # PEs of workers, the first of their role
SHAPE = 1, 2  # workers
CHANGES = 12


@pytest.fixture(
    scope="module",
    params=[("tcp", 1, 2), *(pytest.param(one, marks=pytest.mark.long) for one in (("tcp", 2, 2), ("nixl", 2, 1)))],
    ids=["tcp-1+2", "tcp-2+2", "nixl-2+1"],
)
def served(small_model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    transport, prefill, decode = request.param
    skip_without(transport)
    settings: dict[str, Any] = {
        "model.path": str(small_model),
        "island.transport": transport,
        "island.prefill_ranks": prefill,
        "island.decode_ranks": decode,
        **OVERRIDES,
        "island.num_prefill": 1,
    }
    cluster = Cluster(load_config(None, settings), LocalProcesses(STEADY))
    yield cluster.start()
    cluster.stop()


def ranks(address: str) -> dict[int, list[int]]:
    """Returns the pids of each worker's ranks, by its PE."""
    return {worker.pe: [rank.pid for rank in worker.ranks] or [worker.pid] for worker in workers(address)}


def are_others(address: str, pids: list[int]) -> bool:
    """Returns whether all workers serve, none of them by one of these processes."""
    return whole(address, sum(SHAPE)) and not any(pid in pids for now in ranks(address).values() for pid in now)


@pytest.mark.parametrize(
    ("pe", "rank"),
    [(DECODE, -1), *(pytest.param(pe, 0, marks=pytest.mark.long) for pe in (PREFILL, DECODE))],
    ids=["last of decode", "first of prefill", "first of decode"],
)
def test_any_rank_of_a_worker_dies_and_only_that_worker_is_replaced(
    served: str, expected: list[tuple[list[int], list[int]]], pe: int, rank: int
) -> None:
    until(lambda: whole(served, 3))
    before = ranks(served)
    streams = Streams(served, expected)
    streams.await_begun()
    os.kill(before[pe][rank], signal.SIGKILL)
    attempts = streams.attempts()
    assert attempts.count(1) >= (STREAMS if pe == PREFILL else 1), "streams of another worker were placed again"
    until(lambda: are_others(served, before[pe]))
    after = ranks(served)
    assert [other for other in before if before[other] != after[other]] == [pe]
    assert len(after[pe]) == len(before[pe])
    assert Streams(served, expected).attempts() == [1] * STREAMS


@pytest.mark.long
def test_workers_leave_and_join_and_no_stream_is_placed_again(
    served: str, expected: list[tuple[list[int], list[int]]]
) -> None:
    """A worker with streams leaves, and has no time to end them. Then a worker of each role joins."""
    until(lambda: whole(served, 3))
    before = ranks(served)
    streams = Streams(served, expected)
    streams.await_begun()
    assert scale(served, 1, 1) == 1
    timings = streams.timings()
    assert [one.attempts for one in timings] == [1] * STREAMS
    assert sum(one.moves for one in timings) > 0, "nothing was moved"
    until(lambda: whole(served, 2))
    assert ranks(served) == {pe: before[pe] for pe in (PREFILL, DECODE)}
    streams = Streams(served, expected)
    streams.await_begun()
    assert scale(served, 2, 2) == 2
    assert streams.attempts() == [1] * STREAMS
    until(lambda: whole(served, 4))
    assert scale(served, *SHAPE) == 1
    assert {pe: pids for pe, pids in ranks(served).items() if pe in (PREFILL, DECODE)} == {
        pe: before[pe] for pe in (PREFILL, DECODE)
    }


@pytest.mark.long
def test_a_role_that_grows_while_the_other_shrinks(served: str, expected: list[tuple[list[int], list[int]]]) -> None:
    """Workers with equal numbers of ranks change their roles; if the numbers differ, others join."""
    until(lambda: whole(served, 3))
    sizes = {worker.role: len(worker.ranks) for worker in workers(served)}
    alike = len(set(sizes.values())) == 1
    for shape in ((2, 1), SHAPE):
        streams = Streams(served, expected)
        streams.await_begun()
        assert scale(served, *shape) == (0 if alike else 2)
        assert streams.attempts() == [1] * STREAMS
        roles = [worker.role for worker in workers(served)]
        assert roles.count(inference_pb2.ROLE_PREFILL) == shape[0]
        until(lambda: whole(served, 3))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ranks_die_and_workers_come_and_go_under_load(served: str, expected: list[tuple[list[int], list[int]]]) -> None:
    until(lambda: whole(served, 3))
    over, chance = threading.Event(), random.Random(7)

    def load() -> int:
        rounds = 0
        while not over.is_set():
            Streams(served, expected).attempts()
            rounds += 1
        return rounds

    with ThreadPoolExecutor(1) as pool:
        loads = [pool.submit(load)]
        try:
            for number in range(CHANGES):
                if loads[0].done():
                    break
                if number % 2:
                    scale(served, chance.randint(1, 2), chance.randint(1, 2))
                    continue
                known = ranks(served)
                pid = chance.choice(known[chance.choice([*known])])
                os.kill(pid, signal.SIGKILL)
                until(partial(is_replaced, served, pid, len(known)))
        finally:
            over.set()
        assert loads[0].result(300) > 0
    scale(served, *SHAPE)
    until(lambda: whole(served, 3))


def is_replaced(address: str, pid: int, count: int) -> bool:
    known = workers(address)
    gone = all(pid not in [one.pid, *(rank.pid for rank in one.ranks)] for one in known)
    return gone and len(known) == count and all(one.alive for one in known)
