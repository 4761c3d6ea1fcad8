"""Measures recent load by the counts of the gateway's processes. It reads their table and asks no process."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from tandem.cluster.metrics import series
from tandem.cluster.metrics.cells import Counter, Histogram
from tandem.cluster.metrics.quantile import quantile
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.cluster.supervision.autoscaling.scaling_policy import Load

FRACTION = 0.9  # of values that a target is for
LEAST_VALUES = 10  # fewer in a window tell nothing


@dataclass(frozen=True)
class _Sums:
    """The sums over all processes at a time."""

    at: float
    placed: int
    prompts: int  # tokens
    outputs: int
    first: tuple[int, ...]  # values of each bucket
    gaps: tuple[int, ...]


class LoadMeter:
    """A window over the table's lasting counts. No count goes down, so differences give the load of the window.

    Not for several threads. The table's memory is read as the gateway's processes write it.
    """

    def __init__(self, table: GatewayTable, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """seconds: length of the window."""
        self._table = table
        self._seconds = seconds
        self._clock = clock
        self._seen: deque[_Sums] = deque()

    def restart(self) -> None:
        """Forgets what was counted before."""
        self._seen.clear()

    def read(self) -> Load:
        """Returns the load over the window, or since the restart if that is shorter."""
        now = self._read()
        self._seen.append(now)
        while len(self._seen) > 2 and self._seen[1].at <= now.at - self._seconds:
            self._seen.popleft()
        before = self._seen[0]
        seconds, placed = now.at - before.at, now.placed - before.placed
        queued = self._table.total(Column.QUEUED)
        if not seconds:
            return Load()
        return Load(
            # By Little's law. Without any placement the pace is unknown.
            queue_seconds=(queued * seconds / placed if placed else math.inf) if queued else 0.0,
            first_token_seconds=_quantile(series.FIRST_TOKEN, before.first, now.first),
            token_seconds=_quantile(series.GAPS, before.gaps, now.gaps),
            tokens_per_second=(now.prompts + now.outputs - before.prompts - before.outputs) / seconds,
            output_tokens_per_second=(now.outputs - before.outputs) / seconds,
            placements_per_second=placed / seconds,
        )

    def _read(self) -> _Sums:
        return _Sums(
            self._clock(),
            self._count(series.RESERVATIONS),
            self._count(series.PROMPT_TOKENS),
            self._count(series.GENERATION_TOKENS),
            self._buckets(series.FIRST_TOKEN),
            self._buckets(series.GAPS),
        )

    def _count(self, counter: Counter) -> int:
        return sum(self._cells(series.LAYOUT.first(counter)))

    def _buckets(self, histogram: Histogram) -> tuple[int, ...]:
        first = series.LAYOUT.first(histogram)
        return tuple(sum(self._cells(first + index)) for index in range(len(histogram.bounds) + 1))

    def _cells(self, index: int) -> list[int]:
        return [self._table.lasting(process)[index] for process in range(self._table.processes)]


def _quantile(histogram: Histogram, before: tuple[int, ...], after: tuple[int, ...]) -> float | None:
    counts = [late - early for early, late in zip(before, after, strict=True)]
    if sum(counts) < LEAST_VALUES:
        return None
    return quantile(dict(zip((*histogram.bounds, math.inf), map(float, accumulate(counts)), strict=True)), FRACTION)
