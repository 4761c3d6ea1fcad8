"""The open loop, against targets in this process."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.cluster.tools.bench.lengths import Lengths
from tandem.cluster.tools.bench.load import Load, LoadPart, OpenLoop, PartOutcome
from tandem.cluster.tools.bench.mixes import Slo
from tandem.cluster.tools.bench.sessions import Message
from tandem.cluster.tools.bench.targets import Served
from tandem.cluster.tools.bench.timeline import Running
from tandem.cluster.tools.bench.workload import Workload


class Held:
    """A target that answers nobody until `count` requests are under way, each of which blocks the loop for a while."""

    def __init__(self, count: int, blocks: float = 0.0) -> None:
        self._left, self._blocks = count, blocks
        self._all = asyncio.Event()

    async def served(self) -> Served:
        return Served("m", None, None)

    async def stream(self, messages: Sequence[Message], running: Running, timeout: float) -> None:
        running.sent = time.perf_counter()
        time.sleep(self._blocks)
        self._left -= 1
        if self._left <= 0:
            self._all.set()
        await self._all.wait()
        running.heard()
        running.output_tokens = 1

    async def aclose(self) -> None:
        pass


def loaded(target: Held, measured: int, **options: Any) -> PartOutcome:
    workload = Workload(Lengths.fixed(4), Lengths.fixed(1), vocab_size=100)
    given: dict[str, Any] = {"rate": 1000.0, "warm_up": 5, "measured": measured, "tail": 0, "drain": 20.0, **options}
    load = Load(workload, Slo(60000, 60000), 0, **given)

    async def run() -> PartOutcome:
        return await OpenLoop(LoadPart(load, 0, 1, time.perf_counter() + 0.1), target, lambda missed: True).run()

    return asyncio.run(run())


def test_no_arrival_waits_for_an_answer() -> None:
    outcome = loaded(Held(45), 40)
    assert [timeline.error for timeline in outcome.timelines] == [None] * 40
    assert outcome.most_concurrent == 45


def test_the_window_is_that_of_the_measured_arrivals() -> None:
    outcome = loaded(Held(0), 100, rate=200.0, warm_up=50, tail=40)
    assert outcome.window.seconds == pytest.approx(100 / 200)
    assert outcome.window.requests <= 190


def test_a_generator_that_is_late_says_so() -> None:
    outcome = loaded(Held(9, blocks=0.02), 4, rate=1e6)
    assert max(timeline.late for timeline in outcome.timelines) >= 8 * 0.02 - 0.001


def test_requests_that_never_end_have_failed() -> None:
    outcome = loaded(Held(99), 4, drain=0.2)
    assert {timeline.error for timeline in outcome.timelines} == {"not done 0.2 s after the last arrival"}
    assert len(outcome.timelines) == 4
