"""Workers of one elastic island that die, leave and join, one after another and together, while the others keep their
streams."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.client.client_messages import GenerateUpdate, Timings
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.support.client_requests import tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.steady_steps import STEADY
from tests.support.transports import skip_without
from tests.support.waiting import until

VOCABULARY = 512
NUM_TOKENS = 200
STREAMS = 4
CHANGES = 20
PREFILL, DECODE = 0, 2  # PEs of workers, the first of their role
OVERRIDES: dict[str, Any] = {
    "island.num_prefill": 2,
    "island.num_decode": 2,
    "island.threads_per_worker": 1,
    "gateway.processes": 1,
    "gateway.port": 0,
    "gateway.max_attempts": 20,
    "cache.num_pages": 128,
    "recovery.max_restarts": 100,
    "recovery.drain_seconds": 0.0,  # a worker that leaves moves its requests at once
}


@pytest.fixture(scope="module", params=["tcp", pytest.param("nixl", marks=pytest.mark.long)])
def served(small_model: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    skip_without(request.param)
    overrides = {"model.path": str(small_model), "island.transport": request.param, **OVERRIDES}
    cluster = Cluster(load_config(None, overrides), LocalProcesses(STEADY))
    yield cluster.start()
    cluster.stop()


@pytest.fixture(scope="module")
def expected(small_model: Path) -> list[tuple[list[int], list[int]]]:
    """Returns prompts, and their tokens by transformers."""
    prompts = [random_prompt(20 + 31 * number, number, VOCABULARY) for number in range(STREAMS)]
    return list(zip(prompts, greedy_all(load_oracle(small_model), prompts, NUM_TOKENS), strict=True))


def workers(address: str) -> list[inference_pb2.WorkerInfo]:
    with Client(address) as client:
        (island,) = client.cluster_info().islands
    return sorted(island.workers, key=lambda worker: worker.pe)


def pids(address: str) -> list[int]:
    return [worker.pid for worker in workers(address)]


def whole(address: str, count: int = 4) -> bool:
    """Returns whether all workers serve, nothing is under way, and all their pages are free."""
    known = workers(address)
    idle = [one.alive and one.free_pages == one.num_pages and not one.running and not one.waiting for one in known]
    return len(known) == count and all(idle)


class Streams:
    """Requests that are under way at once. begun: each has some tokens."""

    def __init__(self, address: str, expected: list[tuple[list[int], list[int]]]) -> None:
        self._expected = expected
        self._pool = ThreadPoolExecutor(len(expected))
        self._begun = [threading.Event() for _ in expected]
        self._answers: list[Future[list[GenerateUpdate]]] = [
            self._pool.submit(self._read, address, prompt, begun)
            for (prompt, _), begun in zip(expected, self._begun, strict=True)
        ]

    def await_begun(self) -> None:
        for begun in self._begun:
            assert begun.wait(60)

    def attempts(self) -> list[int]:
        """Returns the attempts of each stream, once all have ended with the expected tokens."""
        return [timings.attempts for timings in self.timings()]

    def timings(self) -> list[Timings]:
        """Returns the timings of each stream, as attempts() does."""
        found = []
        for answer, (_, tokens) in zip(self._answers, self._expected, strict=True):
            updates = answer.result(120)
            assert tokens_of(updates) == tokens
            assert updates[-1].timings is not None
            found.append(updates[-1].timings)
        self._pool.shutdown()
        return found

    @staticmethod
    def _read(address: str, prompt: list[int], begun: threading.Event) -> list[GenerateUpdate]:
        updates = []
        with Client(address) as client:
            for update in client.generate(prompt, timeout=120, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True):
                updates.append(update)
                if len(updates) == 3:
                    begun.set()
        return updates


def kill(address: str, *pes: int) -> list[int]:
    """Kills workers. Returns the pids of all before."""
    before = pids(address)
    for pe in pes:
        os.kill(before[pe], signal.SIGKILL)
    return before


def check_replaced(address: str, before: list[int], *pes: int) -> None:
    """Checks that these workers are other processes now, the others the same, and no page has leaked."""
    until(lambda: whole(address) and all(pids(address)[pe] != before[pe] for pe in pes))
    now = pids(address)
    assert [pe for pe in range(4) if now[pe] != before[pe]] == sorted(pes)


def test_a_decode_worker_dies_and_the_other_keeps_its_streams(
    served: str, expected: list[tuple[list[int], list[int]]]
) -> None:
    until(lambda: whole(served))
    streams = Streams(served, expected)
    streams.await_begun()
    before = kill(served, DECODE)
    attempts = streams.attempts()
    assert sorted(set(attempts)) == [1, 2], "streams of the other worker were not placed again"
    check_replaced(served, before, DECODE)
    assert Streams(served, expected).attempts() == [1] * STREAMS


def test_a_prefill_worker_dies_and_no_stream_notices(served: str, expected: list[tuple[list[int], list[int]]]) -> None:
    until(lambda: whole(served))
    streams = Streams(served, expected)
    streams.await_begun()
    before = kill(served, PREFILL)
    assert streams.attempts() == [1] * STREAMS
    check_replaced(served, before, PREFILL)
    assert Streams(served, expected).attempts() == [1] * STREAMS


@pytest.mark.long
def test_a_prefill_and_a_decode_worker_die_at_once(served: str, expected: list[tuple[list[int], list[int]]]) -> None:
    until(lambda: whole(served))
    streams = Streams(served, expected)
    streams.await_begun()
    before = kill(served, PREFILL, DECODE)
    attempts = streams.attempts()
    assert min(attempts) == 1
    assert max(attempts) in (2, 3), "one that is placed again may meet the other that has died"
    check_replaced(served, before, PREFILL, DECODE)
    assert Streams(served, expected).attempts() == [1] * STREAMS


@pytest.mark.long
@pytest.mark.timeout(600)
def test_twenty_workers_leave_and_come_under_load(served: str, expected: list[tuple[list[int], list[int]]]) -> None:
    """Workers of all places change in turn, sometimes two at once, while streams begin and end all the time."""
    until(lambda: whole(served))
    over = threading.Event()

    def load() -> int:
        rounds = 0
        while not over.is_set():
            Streams(served, expected).attempts()
            rounds += 1
        return rounds

    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load) for _ in range(2)]
        try:
            gone = 0
            while gone < CHANGES and not any(one.done() for one in loads):
                places = {gone % 4, (gone + 1) % 4} if gone % 5 == 4 else {gone % 4}
                before = kill(served, *places)
                until(lambda before=before, places=places: replaced(served, before, places))
                gone += len(places)
        finally:
            over.set()
        assert all(one.result(300) > 0 for one in loads)
    assert gone >= CHANGES
    until(lambda: whole(served))


def replaced(address: str, before: list[int], places: set[int]) -> bool:
    known = workers(address)
    return len(known) == 4 and all(one.alive and (one.pid != before[one.pe]) == (one.pe in places) for one in known)


def scale(address: str, prefill: int, decode: int) -> int:
    """Returns how many workers have joined and left."""
    with Client(address) as client:
        done = client.scale(num_prefill=prefill, num_decode=decode)
    assert done.seconds_away == 0
    return done.started + done.ended


def test_workers_leave_and_join_and_no_stream_is_placed_again(
    served: str, expected: list[tuple[list[int], list[int]]]
) -> None:
    """Two workers with streams leave, and have no time to end them; then two join."""
    for _ in range(3):  # on a busy machine streams may end before their workers hear that they leave
        until(lambda: whole(served))
        before = pids(served)
        streams = Streams(served, expected)
        streams.await_begun()
        assert scale(served, 1, 1) == 2
        timings = streams.timings()
        assert [one.attempts for one in timings] == [1] * STREAMS
        until(lambda: whole(served, 2))
        assert pids(served) == [before[PREFILL], before[DECODE]]
        if any(one.moves for one in timings):
            break
        assert scale(served, 2, 2) == 2
    else:
        raise AssertionError("nothing was moved")
    streams = Streams(served, expected)
    streams.await_begun()
    assert scale(served, 2, 2) == 2
    assert streams.attempts() == [1] * STREAMS
    until(lambda: whole(served))
    assert [pid for pid in pids(served) if pid in before] == [before[PREFILL], before[DECODE]]
    assert Streams(served, expected).attempts() == [1] * STREAMS


@pytest.mark.long
def test_what_ends_in_time_is_not_moved(small_model: Path, expected: list[tuple[list[int], list[int]]]) -> None:
    """The worker leaves, and either of two gateway processes has the requests."""
    overrides = {"island.transport": "tcp", "recovery.drain_seconds": 100.0, "gateway.processes": 2}
    cluster = Cluster(
        load_config(None, {"model.path": str(small_model), **OVERRIDES, **overrides}), LocalProcesses(STEADY)
    )
    address = cluster.start()
    try:
        streams = Streams(address, expected)
        streams.await_begun()
        before = pids(address)
        assert scale(address, 1, 1) == 2
        assert [(one.attempts, one.moves) for one in streams.timings()] == [(1, 0)] * STREAMS
        until(lambda: whole(address, 2))
        assert pids(address) == [before[PREFILL], before[DECODE]]
    finally:
        cluster.stop()


@pytest.mark.long
def test_a_worker_changes_its_role_and_no_stream_is_placed_again(
    served: str, expected: list[tuple[list[int], list[int]]]
) -> None:
    until(lambda: whole(served))
    before = pids(served)
    for prefill, decode in ((3, 1), (1, 3), (2, 2)):
        streams = Streams(served, expected)
        streams.await_begun()
        assert scale(served, prefill, decode) == 0
        assert streams.attempts() == [1] * STREAMS
        roles = [worker.role for worker in workers(served)]
        assert roles.count(inference_pb2.ROLE_PREFILL) == prefill
        until(lambda: whole(served))
        assert pids(served) == before


@pytest.mark.long
@pytest.mark.parametrize("victim", ["stays", "leaves"])
def test_a_worker_dies_while_another_joins_or_leaves(
    served: str, expected: list[tuple[list[int], list[int]]], victim: str
) -> None:
    until(lambda: whole(served))
    chance = random.Random(victim)
    with ThreadPoolExecutor(1) as pool:
        for shape in ((3, 3), (2, 2), (1, 3), (2, 2)):
            known = {(worker.pe, worker.pid): worker.role for worker in workers(served)}
            streams = Streams(served, expected)
            streams.await_begun()
            scaled = pool.submit(scale, served, *shape)
            time.sleep(chance.uniform(0, 0.3))
            of_role = sorted(key for key, role in known.items() if role == inference_pb2.ROLE_DECODE)
            pe, pid = of_role[0] if victim == "stays" else of_role[-1]
            with suppress(ProcessLookupError):  # it has left
                os.kill(pid, signal.SIGKILL)
            scaled.result(60)
            assert max(streams.attempts()) <= 2
            until(lambda shape=shape: whole(served, sum(shape)))
            assert pid not in pids(served)
            stay = [other for other in known if other[0] < min(len(known), sum(shape)) - 1 and other[0] != pe]
            assert len({pid for _, pid in stay} & set(pids(served))) >= 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_workers_join_and_leave_under_load(served: str, expected: list[tuple[list[int], list[int]]]) -> None:
    """No stream is placed again, no page is lost, and the first worker stays all the time."""
    until(lambda: whole(served))
    before, over, chance = pids(served), threading.Event(), random.Random(5)

    def load() -> int:
        rounds = 0
        while not over.is_set():
            assert Streams(served, expected).attempts() == [1] * STREAMS
            rounds += 1
        return rounds

    changes = 0
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(load) for _ in range(2)]
        try:
            while changes < 5 * CHANGES and not any(one.done() for one in loads):
                changes += scale(served, chance.randint(1, 3), chance.randint(1, 3))
            changes += scale(served, 2, 2)
        finally:
            over.set()
        assert all(one.result(300) > 0 for one in loads)
    assert changes >= 5 * CHANGES
    until(lambda: whole(served))
    assert pids(served)[PREFILL] == before[PREFILL]
