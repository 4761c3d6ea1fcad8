"""Rows that are parked while steps of them are in flight, with overlap scheduling and verify steps."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

from tandem.cache.store.lanes import MakeLanes
from tandem.cache.store.parked_store import ParkedStore
from tandem.workers.config import ParkingSettings
from tandem.workers.errors import NoRoom
from tandem.workers.requests.token_stream import TokenStream
from tandem.workers.sampling.finish import FinishReason
from tests.cache.late_lanes import LateLanes
from tests.workers.decode.test_overlap_scheduling import NUM_PAGES, Bench, ScriptedRunner, expected
from tests.workers.decode.test_verify_steps import drafting

WHOLE, PART = ParkingSettings(most=8, seconds=1e6), ParkingSettings(most=8, seconds=1e6, reserved_output=0.05)


class LateRunner(ScriptedRunner):
    """The device comes past what was launched three looks later. In the storm its copies are late, too."""

    def mark(self) -> Callable[[], bool]:  # type: ignore[override]
        looks = iter((False, False))
        return lambda: next(looks, True)


class ParkingBench(Bench):
    def __init__(
        self, parking: ParkingSettings, slots: int = 64, lanes: MakeLanes | None = None, **options: Any
    ) -> None:
        self.now = 1000.0
        super().__init__(clock=lambda: self.now, parking=parking, **options)
        self.store = ParkedStore(self.receiver.pools, [slots], None, lanes)
        self.cache.keep_parked(self.store)

    def asks(self, name: str, max_tokens: int, priority: int) -> tuple[int, TokenStream] | None:
        """Its sequence; None where it finds no room."""
        try:
            reservation, stream = self.start(name, max_tokens, priority=priority)
        except NoRoom:
            return None
        return reservation.reservation_id, stream

    def step(self) -> None:
        self.now += 0.05
        self.loop.step()

    def assert_free(self) -> None:
        assert self.cache.num_free_pages == NUM_PAGES
        assert self.store.counts[:2] == (0, 0)
        assert len(self.decodes._parking) == 0


def test_a_row_whose_step_is_in_flight_is_parked_once_that_is_read() -> None:
    bench = ParkingBench(WHOLE)
    low = bench.asks("low", 58, 5)
    assert low is not None
    other = bench.asks("other", 25, 0)
    assert other is not None
    for _ in range(3):
        bench.step()
    assert bench.decodes._steps.behind is not None
    bench.runner.done_until = 0
    assert bench.asks("high", 40, 0) is None
    for _ in range(4):
        bench.step()
        assert bench.decodes._parking._leaving  # nothing is read yet
    bench.runner.done_until = 1000
    while bench.decodes._parking._leaving:
        bench.step()
    assert bench.cache.pages.parked == 1
    high = bench.asks("high", 40, 0)
    assert high is not None
    for _ in range(400):
        bench.step()
    for sequence, stream, most in ((*low, 58), (*other, 25), (*high, 40)):
        assert bench.collector.tokens[stream] == expected(sequence, most)
    bench.assert_free()


@pytest.mark.gate("late-followed-part", "at once-verified-whole", "late-none-part")
@pytest.mark.parametrize("parking", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize("drafts", ["none", "verified", "followed"])
@pytest.mark.parametrize("runner", [ScriptedRunner, LateRunner], ids=["at once", "late"])
def test_storms(parking: ParkingSettings, drafts: str, runner: type[ScriptedRunner]) -> None:
    counts = Counter[str]()
    for seed in range(3):
        random = Random(seed)
        options = drafting(drafts, seed)
        if runner is LateRunner:
            options["lanes"] = partial(LateLanes, random=Random(seed), most_looks=12)
        bench = ParkingBench(parking, runner=runner, slots=random.choice([24, 64]), **options)
        if drafts == "followed":
            bench.follow()
        waiting = [(f"{number}", random.randint(2, 59), random.randint(0, 3)) for number in range(14)]
        begun: dict[str, tuple[int, TokenStream, int]] = {}
        for _ in range(1500):
            if waiting and random.random() < 0.5:
                name, most, priority = random.choice(waiting)
                found = bench.asks(name, most, priority)
                if found is not None:
                    waiting.remove((name, most, priority))
                    begun[name] = (*found, most)
            if begun and random.random() < 0.01:
                bench.decodes.abort(random.choice(list(begun)), writer_quiet=True)
            bench.runner.done_until = random.choice([0, 1000, 1000])
            bench.step()
            if not waiting and not len(bench.decodes._reservations):
                break
        assert not waiting
        bench.runner.done_until = 100_000
        for _ in range(20):
            bench.step()
        bench.assert_free()
        for sequence, stream, most in begun.values():
            tokens, end = bench.collector.tokens.get(stream, []), bench.collector.ends[stream]
            assert tokens == expected(sequence, most)[: len(tokens)]
            assert end == FinishReason.ABORT or len(tokens) == most - 1
            counts[str(end)] += 1
        counts["parks"] += bench.decodes._parking._counters.parks
        counts["resumes"] += bench.decodes._parking._counters.resumes
    assert counts["parks"] > 2
    assert counts["resumes"] > 2
    assert counts[str(FinishReason.LENGTH)] > 25
