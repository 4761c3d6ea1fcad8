"""The search for the goodput, against servers in virtual time whose capacity is known."""

import asyncio
from array import array
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from tandem.cluster.tools.bench.lengths import Lengths
from tandem.cluster.tools.bench.load import Load, PartOutcome, Window
from tandem.cluster.tools.bench.mixes import Slo
from tandem.cluster.tools.bench.serve import Bench, Found
from tandem.cluster.tools.bench.settings import LoadOptions
from tandem.cluster.tools.bench.sweep import Sweep, arrivals_for
from tandem.cluster.tools.bench.timeline import Running, Timeline
from tandem.cluster.tools.bench.workload import Workload

SLO = Slo(ttft_ms=100, gap_ms=10)
WORKLOAD = Workload(Lengths.fixed(8), Lengths.fixed(2), vocab_size=100)


class Queue:
    """A server of `num_servers`, each of which takes `seconds` for a request; others wait. Tokens come at its end."""

    def __init__(self, num_servers: int, seconds: float) -> None:
        self._free, self._seconds = num_servers, seconds
        self.loads: list[Load] = []

    def first_tokens(self, arrivals: Sequence[float]) -> list[float]:
        """Seconds from each arrival."""
        free, waited = [0.0] * self._free, []
        for due in arrivals:
            first = min(range(len(free)), key=free.__getitem__)
            free[first] = max(free[first], due) + self._seconds
            waited.append(free[first] - due)
        return waited

    async def run(self, load: Load, most_missed: int | None) -> PartOutcome:
        self.loads.append(load)
        counts = (load.warm_up, load.measured, load.tail)
        arrivals = load.workload.sessions(load.number).arrivals(counts, load.rate, load.burstiness).tolist()
        timelines = []
        for due, waited in list(zip(arrivals, self.first_tokens(arrivals), strict=True))[load.warm_up :][
            : load.measured
        ]:
            running = Running(
                2, due, sent=due, arrivals=array("d", (due + waited, due + waited + 0.001)), output_tokens=2
            )
            timelines.append(Timeline.of(running))
        missed = sum(not each.meets(load.slo) for each in timelines)
        return PartOutcome(
            timelines, Window(0, 0, 1), 0, 0.1, 1, stopped=most_missed is not None and missed > most_missed
        )


def sweep(server: Queue, start: float, precision: float, budget: float = 1e9) -> Found:
    bench = Bench(server.run, WORKLOAD, SLO, LoadOptions(), lambda numbers: None)
    return asyncio.run(bench.sweep(start, precision, budget))


@cache
def capacity() -> float:
    """The rate at which Queue(2, 0.04) keeps the SLO for 90 %, by very long loads."""
    server = Queue(2, 0.04)
    rates = np.arange(24.0, 50.0)
    kept = []
    for rate in rates:
        arrivals = np.cumsum(np.random.default_rng(5).exponential(1 / rate, 10000)).tolist()
        kept.append(np.mean(np.array(server.first_tokens(arrivals)) <= 0.1) >= 0.9)
    return float(rates[np.flatnonzero(kept)[-1]])


@pytest.mark.parametrize("start", [1.0, 300.0])
def test_the_goodput_of_a_queue_is_found(start: float) -> None:
    server = Queue(2, 0.04)
    found = sweep(server, start, 0.05)
    assert found.complete
    assert found.precision is not None
    assert found.precision <= 0.051
    assert found.goodput == pytest.approx(capacity(), rel=0.1)
    assert found.missed_at is not None
    assert found.goodput < found.missed_at <= 1.05 * found.goodput
    assert max(load.measured for load in server.loads if load.rate == found.goodput) >= arrivals_for(0.05) == 400


def test_trials_are_few_and_unlike() -> None:
    server = Queue(2, 0.04)
    sweep(server, 20.0, 0.05)
    assert len(server.loads) <= 9
    assert len({load.number for load in server.loads}) == len(server.loads)


@pytest.mark.parametrize("capacity", [0.7, 5.0, 37.0, 1000.0])
def test_bisection_of_a_sharp_limit(capacity: float) -> None:
    sweep = Sweep(start=8.0, precision=0.02, arrivals=100)
    while (trial := sweep.next()) is not None:
        sweep.add(trial, kept=trial.rate <= capacity)
    assert sweep.low is not None
    assert sweep.high is not None
    assert sweep.low <= capacity < sweep.high <= 1.02 * sweep.low


def test_a_rough_trial_that_a_full_one_contradicts_is_not_the_goodput() -> None:
    sweep, tried = Sweep(start=8.0, precision=0.1, arrivals=100), []
    while (trial := sweep.next()) is not None:
        tried.append(trial)
        sweep.add(trial, kept=trial.rate < (8.5 if trial.arrivals < 100 else 7.0))
    assert sweep.low is not None
    assert 7.0 / 1.1 <= sweep.low < 7.0
    assert any(trial.arrivals == 100 and trial.rate == sweep.low for trial in tried)


def test_a_server_that_keeps_up_with_nothing() -> None:
    found = sweep(Queue(1, 1.0), 1.0, 0.1)
    assert (found.goodput, found.complete, found.precision) == (0.0, True, None)


def test_a_budget_that_is_spent_ends_the_sweep_with_what_is_known() -> None:
    server = Queue(2, 0.04)
    assert sweep(server, 20.0, 0.05, budget=5.0) == Found(0.0, None, 0, complete=False)
    assert server.loads == []


def test_a_small_budget_makes_small_trials_and_says_so() -> None:
    server = Queue(2, 0.04)
    found = sweep(server, 20.0, 0.05, budget=20.0)  # virtual loads take none of it
    assert found.arrivals == min(
        load.measured for load in server.loads if load.rate in (found.goodput, found.missed_at)
    )
    assert found.precision is not None
    assert found.precision >= found.arrivals**-0.5 > 0.05
