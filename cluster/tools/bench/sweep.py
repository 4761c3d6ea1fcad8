"""Searches for the highest rate that keeps the SLO. Pure: it says what to try next, and is told the outcome."""

import math
from dataclasses import dataclass, field

BRACKET_FACTOR = 2.0
ROUGH = 0.25  # of the arrivals of a trial: enough to tell twice the rate from half of it
LOWEST, HIGHEST = 1 / 1024, 1024.0  # times the first rate


def arrivals_for(precision: float) -> int:
    """Returns the arrivals of a trial: the number of a Poisson process's arrivals in a window is then as precise."""
    return math.ceil(precision**-2)


@dataclass(frozen=True)
class Trial:
    """rate: requests a second. arrivals: of measured requests."""

    rate: float
    arrivals: int


@dataclass
class Sweep:
    """Doubles or halves the rate until one rate is kept and another is missed, then halves the ratio between them.

    start: the first rate. precision: the ratio of those two, less 1, at which it ends. arrivals: of a full trial. The
    rates at the bracket's ends are tried with fewer arrivals at first. A goodput is one of a full trial.
    """

    start: float
    precision: float
    arrivals: int
    _kept: dict[float, bool] = field(default_factory=dict)  # per rate whether its trial was a full one
    _missed: set[float] = field(default_factory=set)

    def next(self) -> Trial | None:
        """Returns the next trial; None when it is done."""
        low, high = self.low, self.high
        rough = math.ceil(self.arrivals * ROUGH)
        if low is None and high is None:
            return Trial(self.start, rough)
        if high is None:
            assert low is not None
            return Trial(low * BRACKET_FACTOR, rough) if low < self.start * HIGHEST else None
        if low is None:
            return Trial(high / BRACKET_FACTOR, rough) if high > self.start * LOWEST else None
        if not self.is_precise:
            return Trial(math.sqrt(low * high), self.arrivals)
        return None if self._kept[low] else Trial(low, self.arrivals)

    def add(self, trial: Trial, *, kept: bool) -> None:
        """Adds an outcome. kept: whether enough of its requests met the SLO."""
        if kept:
            self._kept[trial.rate] = trial.arrivals >= self.arrivals
        else:
            self._kept.pop(trial.rate, None)
            self._missed.add(trial.rate)

    @property
    def low(self) -> float | None:
        """The highest kept rate below all missed rates."""
        return max((rate for rate in self._kept if rate < (self.high or math.inf)), default=None)

    @property
    def high(self) -> float | None:
        """The lowest missed rate."""
        return min(self._missed, default=None)

    @property
    def is_precise(self) -> bool:
        return self.low is not None and self.high is not None and self.high / self.low <= 1 + self.precision

    @property
    def trials_left(self) -> int:
        """Estimates how many trials are still to come."""
        if self.low is None or self.high is None:
            ratio, more = BRACKET_FACTOR, 2
        else:
            ratio, more = self.high / self.low, 0 if self._kept[self.low] else 1
        halvings = math.log(ratio) / math.log1p(self.precision)
        return more + max(0, math.ceil(math.log2(halvings))) if halvings > 0 else more
