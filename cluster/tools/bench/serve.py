"""`tandem bench serve`: loads at given rates, or a sweep that finds the goodput, within a budget of seconds."""

import dataclasses
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tandem.cluster.errors import BenchmarkFailed, UsageError
from tandem.cluster.tools.bench.generators import Generators
from tandem.cluster.tools.bench.load import Load, PartOutcome
from tandem.cluster.tools.bench.measures import Numbers, numbers_of, steady_numbers, warnings_of
from tandem.cluster.tools.bench.mixes import Slo
from tandem.cluster.tools.bench.open_target import open_target
from tandem.cluster.tools.bench.settings import LoadOptions, Settings
from tandem.cluster.tools.bench.sweep import Sweep, Trial, arrivals_for
from tandem.cluster.tools.bench.targets import Refused
from tandem.cluster.tools.bench.workload import Workload

LEAST_SECONDS = 8.0  # of a trial's measured arrivals, so that a load comes to its steady state
LEAST_BUDGETED_SECONDS = 4.0  # the same, if the budget is small
SLACK_SECONDS = 5.0  # beyond the SLO's time, before a sweep's trial counts a request as failed

Run = Callable[[Load, int | None], Awaitable[PartOutcome]]
"""The type of Generators.run."""

Show = Callable[[Numbers], None]


@dataclass(frozen=True)
class Found:
    """The result of a sweep: goodput, in requests a second, and the lowest rate that missed the SLO.

    arrivals: of the smallest trial that both rest on. complete: whether the budget was enough.
    """

    goodput: float
    missed_at: float | None
    arrivals: int
    complete: bool

    @property
    def precision(self) -> float | None:
        """The goodput's precision as a fraction: the bracket's width, or what the number of arrivals allows if that is
        more.

        None if no rate missed the SLO, or none kept it.
        """
        if not self.goodput or self.missed_at is None:
            return None
        return max(self.missed_at / self.goodput - 1, self.arrivals**-0.5)

    @property
    def numbers(self) -> dict[str, Any]:
        return {
            "goodput_rps": self.goodput,
            "missed_at_rps": self.missed_at,
            "precision": self.precision,
            "arrivals": self.arrivals,
            "complete": self.complete,
        }


@dataclass
class Bench:
    """Loads of one workload on one target, one after the other. run: makes one; show: gets its numbers."""

    run: Run
    workload: Workload
    slo: Slo
    options: LoadOptions
    show: Show
    runs: list[Numbers] = field(default_factory=list)

    async def at_rate(self, rate: float | None) -> None:
        """rate: requests a second; None is the trace's own."""
        wanted = self.options.requests or (None if rate is None else round(rate * self.options.seconds))
        await self._run(rate, wanted, None, self.options.timeout)

    async def sweep(self, start: float, precision: float, budget_seconds: float) -> Found:
        """Looks for the goodput until it is known to `precision`, or the budget is spent."""
        ends = time.perf_counter() + budget_seconds
        sweep = Sweep(start, precision, self.options.requests or arrivals_for(precision))
        arrivals: dict[float, int] = {}
        while (trial := sweep.next()) is not None:
            requests = self._requests_within(ends - time.perf_counter(), trial, sweep)
            if requests is None:
                break
            numbers = await self._run(trial.rate, requests, 1 - self.slo.fraction, self._slo_seconds + SLACK_SECONDS)
            sweep.add(trial, kept=not numbers["stopped_early"] and numbers["slo_attainment"] >= self.slo.fraction)
            arrivals[trial.rate] = requests
        ends_at = [arrivals[rate] for rate in (sweep.low, sweep.high) if rate is not None]
        return Found(sweep.low or 0.0, sweep.high, min(ends_at, default=0), complete=trial is None)

    def _requests_within(self, seconds_left: float, trial: Trial, sweep: Sweep) -> int | None:
        """Returns the measured arrivals of a trial that takes a fair part of the time left; None when too little is
        left."""
        apart = self.options.warm_up_seconds + self._slo_seconds + 1.0
        most = seconds_left - apart
        if most < LEAST_BUDGETED_SECONDS:
            return None
        wanted = max(LEAST_SECONDS, trial.arrivals / trial.rate)
        fair = max(LEAST_BUDGETED_SECONDS, seconds_left / max(1, sweep.trials_left) - apart)
        return max(1, round(trial.rate * min(wanted, fair, most)))

    @property
    def _slo_seconds(self) -> float:
        """Returns about how long the slowest request takes that keeps the SLO."""
        one = (self.slo.ttft_ms + self.slo.gap_ms * self.workload.longest_output) / 1e3
        return self.workload.turns * (one + self.workload.pause)

    async def _run(self, rate: float | None, requests: int | None, missed: float | None, drain: float) -> Numbers:
        """Makes a load. requests: measured ones; None: a whole trace. missed: the fraction of them at which it
        stops."""
        load = self._load(rate, requests, drain)
        measured = load.measured * self.workload.turns
        outcome = await self.run(load, None if missed is None else int(measured * missed + 1e-9))
        numbers = {
            "request_rate": rate,
            "burstiness": load.burstiness,
            "num_prompts": measured,
            **numbers_of(outcome.timelines, self.slo, outcome.overdue),
            **steady_numbers(outcome.window),
            "stopped_early": outcome.stopped,
            "max_concurrent_requests": outcome.most_concurrent,
            "generator_busy": outcome.busy,
        }
        self.runs.append(numbers | {"warnings": warnings_of(numbers)})
        self.show(self.runs[-1])
        return self.runs[-1]

    def _load(self, rate: float | None, requests: int | None, drain: float) -> Load:
        options, workload = self.options, self.workload
        sessions = (rate or 0.0) / workload.turns
        warm_up, tail = round(sessions * options.warm_up_seconds), round(sessions * options.tail_seconds)
        most = workload.num_sessions
        if most is not None:
            warm_up = min(warm_up, most // 2)
            requests = min(requests or most, most - warm_up)
            tail = min(tail, most - warm_up - requests)
        if not requests:
            raise UsageError(f"a load of {rate:g} requests/s and {options.seconds:g} s has no request; one is needed")
        return Load(
            workload,
            self.slo,
            number=len(self.runs),
            rate=rate,
            warm_up=warm_up,
            measured=-(-requests // workload.turns),
            tail=tail,
            burstiness=options.burstiness,
            max_concurrency=options.max_concurrency,
            timeout=options.timeout,
            drain=drain,
        )


@dataclass(frozen=True)
class Result:
    """The result of a command. described: the load, in words and numbers."""

    described: dict[str, Any]
    runs: list[Numbers]
    found: Found | None

    @property
    def numbers(self) -> dict[str, Any]:
        """Everything, for JSON."""
        goodput = None if self.found is None else self.found.numbers
        return self.described | {"runs": self.runs, "goodput": goodput}


async def serve_bench(settings: Settings, embedded: str | None, show: Show) -> Result:
    """Runs everything that the settings ask for.

    embedded: HOST:PORT of a cluster that was started for it. show: gets the numbers of each load. Raises UsageError,
    ConfigError, CallError, BenchmarkFailed.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    spec = settings.target if embedded is None else dataclasses.replace(settings.target, grpc=embedded)
    async with aclosing(open_target(spec)) as target:
        try:
            served = await target.served()
        except Refused as error:
            raise BenchmarkFailed(f"{', '.join(spec.urls) or spec.grpc}: {error}") from None
    workload = settings.workload(served)
    workload.check()
    found = None
    async with Generators(settings.num_processes, dataclasses.replace(spec, model=served.model)) as generators:
        bench = Bench(generators.run, workload, settings.slo, settings.load_options, show)
        if settings.sweeps:
            found = await bench.sweep(settings.start_rate, settings.precision, settings.budget)
        else:
            for rate in settings.rates or (None,):
                await bench.at_rate(rate)
    return Result({"date": date, **settings.described(served)}, bench.runs, found)
