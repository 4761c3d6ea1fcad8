"""Rows that pause while a more urgent prompt is computed."""

from collections import Counter
from random import Random
from typing import Any, cast

import pytest

from tandem.cache.store.parked_store import ParkedStore
from tandem.workers.config import ParkingSettings
from tandem.workers.decode.yielded_rows import LEAST_SECONDS, MOST_SECONDS, YieldedRows
from tandem.workers.errors import NoRoom
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.scheduling.decode_rows import DecodeRows
from tests.workers.decode.test_overlap_scheduling import NUM_PAGES, PROMPT, Bench, expected
from tests.workers.decode.test_prompts_beside_rows import PromptRunner, own, start_own
from tests.workers.decode.test_verify_steps import drafting

NO_PARKING, PARKING = ParkingSettings(), ParkingSettings(most=8, seconds=1e6)
OVERCOMMIT = ParkingSettings(most=8, seconds=1e6, reserved_output=0.05)
STEP_SECONDS = 0.01


class YieldingBench(Bench):
    """Chunks of 8 tokens. Each step of the loop takes STEP_SECONDS."""

    def __init__(self, parking: ParkingSettings = NO_PARKING, **options: Any) -> None:
        self.now = 1000.0
        super().__init__(runner=PromptRunner, max_batch_tokens=8, clock=lambda: self.now, parking=parking, **options)
        self.store = ParkedStore(self.receiver.pools, [64])
        if parking.most:
            self.cache.keep_parked(self.store)

    @property
    def device(self) -> PromptRunner:
        return cast(PromptRunner, self.runner)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += STEP_SECONDS
            self.loop.step()

    def launches(self, begin: int = 0) -> list[str]:
        """Returns the rows of each step, and each chunk, that was launched since."""
        launched = [line.partition(": ")[2] if "launch" in line else line for line in self.runner.log[begin:]]
        return [line for line in launched if line.startswith(("[", "chunk"))]

    def end_all(self) -> None:
        for _ in range(400):
            self.step()
        assert not len(self.decodes._reservations)
        assert self.cache.num_free_pages == NUM_PAGES
        assert self.store.counts[:2] == (0, 0)


def test_rows_pause_until_a_more_urgent_prompt_is_computed() -> None:
    """Those that are as urgent go on beside it."""
    bench = YieldingBench()
    _, low = bench.start("low", 30, priority=5)
    _, equal = bench.start("equal", 30)
    bench.step(3)
    begin = len(bench.runner.log)
    urgent = start_own(bench, "urgent", 20, 3)
    bench.step(4)
    assert bench.launches(begin) == ["[2]", "chunk of [3]: [7]", "[2]", "chunk of [3]: [7]", "[2]", "chunk of [3]: [6]",
                                     "[2, 1, 3]"]  # fmt: skip
    bench.end_all()
    assert bench.collector.tokens == {low: expected(1, 30), equal: expected(2, 30), urgent: own(3, 20, 3)}


def test_a_prompt_has_the_device_to_itself_where_all_rows_pause() -> None:
    bench = YieldingBench()
    _, low = bench.start("low", 30, priority=5)
    bench.step(3)
    begin = len(bench.runner.log)
    urgent = start_own(bench, "urgent", 20, 3)
    bench.step(4)
    assert bench.launches(begin)[:3] == ["chunk of [2]: [8]", "chunk of [2]: [8]", "chunk of [2]: [4]"]
    assert bench.decodes.num_running == 2
    bench.end_all()
    assert bench.collector.tokens == {low: expected(1, 30), urgent: own(2, 20, 3)}


def test_a_worker_reports_rows_that_pause() -> None:
    """Else a router would take it for one that decodes nothing."""
    bench = YieldingBench()
    _, low = bench.start("low", 30, priority=5)
    bench.step(3)
    start_own(bench, "urgent", 30, 3)
    bench.step(3)
    figures = bench.loop.figures()
    assert not len(bench.loop.scheduler.rows)
    assert figures.rows == 1
    assert figures.positions == PROMPT + len(bench.collector.tokens[low])
    bench.end_all()


def test_rows_do_not_pause_for_prompts_of_their_priority() -> None:
    bench = YieldingBench()
    bench.start("row", 30)
    bench.step(3)
    begin = len(bench.runner.log)
    for name, priority in (("equal", 0), ("lower", 5)):
        start_own(bench, name, 20, 3, priority=priority)
    bench.step(3)
    assert bench.launches(begin)[::2] == ["[1]"] * 3
    bench.end_all()


@pytest.mark.parametrize("when", ["its step is in flight", "it pauses"])
def test_a_row_is_cancelled_while_it_pauses(when: str) -> None:
    bench = YieldingBench()
    _, low = bench.start("low", 30, priority=5)
    bench.step(3)
    if when == "its step is in flight":
        bench.device.done_until = 0
    urgent = start_own(bench, "urgent", 40, 2)
    bench.step(2)
    assert bench.decodes.abort("low", writer_quiet=True)
    bench.device.done_until = 1000
    bench.end_all()
    assert bench.collector.ends == {low: FinishReason.ABORT, urgent: FinishReason.LENGTH}
    assert bench.collector.tokens[urgent] == own(2, 40, 2)


def test_a_row_that_pauses_is_parked_for_another_request() -> None:
    bench = YieldingBench(PARKING)
    _, low = bench.start("low", 50, priority=5)  # 14 of 24 pages
    bench.step(3)
    urgent = start_own(bench, "urgent", 30, 2)  # 8 pages
    bench.step(2)
    assert len(bench.decodes._parking.yielded) == 1
    with pytest.raises(NoRoom):
        start_own(bench, "other", 30, 2)
    bench.step(2)
    other = start_own(bench, "other", 30, 2)
    assert bench.cache.pages.parked == 1
    bench.end_all()
    assert bench.collector.tokens == {low: expected(1, 50), urgent: own(2, 30, 2), other: own(4, 30, 2)}


def test_pauses_take_at_most_half_of_the_time() -> None:
    """Urgent prompts come without end."""
    bench = YieldingBench()
    bench.device.chunks_done = 10**6
    _, low = bench.start("low", 59, priority=5)
    steps = 0
    while low not in bench.collector.ends and steps < 1000:
        if not len(bench.loop.prefills._scheduler._running):
            start_own(bench, f"urgent {steps}", 30, 1)
        bench.step()
        steps += 1
    assert bench.collector.tokens[low] == expected(1, 59)
    assert MOST_SECONDS / STEP_SECONDS < steps < 2 * (MOST_SECONDS / STEP_SECONDS + 58)


def request_of(level: int) -> DecodeRequest:
    request = cast(DecodeRequest, type("Request", (), {})())
    request.level = level
    return request


class Rows:
    """Stands for DecodeRows."""

    def __init__(self, requests: list[DecodeRequest]) -> None:
        self.requests = requests

    @property
    def last_level(self) -> int:
        return max((request.level for request in self.requests), default=0)

    def leave(self, requests: list[DecodeRequest]) -> None:
        self.requests = [one for one in self.requests if one not in requests]


def test_random_pauses_are_bounded_and_lose_nobody() -> None:
    for seed in range(20):
        random, now = Random(seed), 0.0
        everybody = [request_of(random.randint(0, 3)) for _ in range(6)]
        rows = Rows(list(everybody))
        yielded = YieldedRows(cast(DecodeRows, rows), lambda: now)  # noqa: B023
        paused = longest = since = 0.0
        for _ in range(2000):
            urgent = random.choice([None, -1, 1, 2]) if random.random() < 0.2 else -1
            found = yielded.update(urgent)
            assert not set(found) & set(yielded.requests)
            rows.requests += found
            assert sorted(map(id, [*rows.requests, *yielded.requests])) == sorted(map(id, everybody))
            step = random.choice([0.005, 0.02])
            now += step
            since = since + step if len(yielded) else 0.0
            paused, longest = paused + step * bool(len(yielded)), max(longest, since)
        assert 0.4 * now < paused < 0.5 * now + MOST_SECONDS
        assert LEAST_SECONDS <= longest < MOST_SECONDS + 0.2


@pytest.mark.parametrize("parking", [NO_PARKING, PARKING, OVERCOMMIT], ids=["no parking", "parking", "overcommit"])
@pytest.mark.parametrize("drafts", ["none", "verified", "followed"])
def test_storms(parking: ParkingSettings, drafts: str) -> None:
    """Prompts of peers and of this worker, of four priorities, on few pages. Some are cancelled."""
    counts = Counter[str]()
    for seed in range(5):
        random = Random(seed)
        options = drafting(drafts, seed)
        bench = YieldingBench(parking, **options)
        bench.device.may_wait = True
        if drafts == "followed":
            bench.follow()
        begun: dict[str, tuple[int, TokenStream, int, int]] = {}
        waiting = [f"r{number}" for number in range(16)]
        for _ in range(3000):
            if waiting and random.random() < 0.3:
                name, priority = waiting[0], random.randint(0, 3)
                length, most = random.randint(3, 30), random.randint(2, 30)
                try:
                    if random.random() < 0.5:
                        stream = start_own(bench, name, length, most, priority=priority)
                    else:
                        length, stream = 0, bench.start(name, most, priority=priority)[1]
                except NoRoom:
                    pass
                else:
                    waiting.pop(0)
                    begun[name] = bench.decodes._reservations._requests[name].sequence_id, stream, length, most
            if begun and random.random() < 0.01:
                bench.decodes.abort(random.choice(list(begun)), writer_quiet=True)
            bench.device.done_until = random.choice([0, 10_000, 10_000])
            bench.device.chunks_done = random.choice([0, 10_000, 10_000])
            bench.step()
            counts["yields"] += len(bench.decodes._parking.yielded)
            if not waiting and not len(bench.decodes._reservations):
                break
        assert not waiting
        bench.device.done_until = bench.device.chunks_done = 100_000
        bench.end_all()
        for sequence, stream, length, most in begun.values():
            tokens, due = bench.collector.tokens.get(stream, []), expected(sequence, most)
            if length:
                due = own(sequence, length, most)
            assert tokens == due[: len(tokens)]
            assert bench.collector.ends[stream] == FinishReason.ABORT or len(tokens) == len(due)
            counts[str(bench.collector.ends[stream])] += 1
    assert counts["yields"] > 10
    assert counts[str(FinishReason.LENGTH)] > 40
