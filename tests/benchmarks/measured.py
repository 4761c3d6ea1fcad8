"""Numbers as benchmarks give them: to a few digits, and with the spread of their repeats."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Self

DIGITS = 4


class Measured(float):
    """A number made of repeats: plain in JSON. A record keeps its spread, too.

    low, high: the least and the largest repeat. repeats: how many there were.
    """

    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, value: float, repeats: Sequence[float]) -> Self:
        """value: what stands for them all. To DIGITS digits."""
        measured = cls(rounded(value))
        measured.low, measured.high, measured.repeats = rounded(min(repeats)), rounded(max(repeats)), len(repeats)
        return measured

    @classmethod
    def median(cls, values: Iterable[float], scale: float = 1.0) -> Self:
        """Returns the median of one value or more, each times `scale`."""
        scaled = [value * scale for value in values]
        return cls.of(statistics.median(scaled), scaled)

    def scaled(self, factor: float) -> Self:
        """Converts to another unit."""
        measured = type(self).of(self * factor, (self.low * factor, self.high * factor))
        measured.repeats = self.repeats
        return measured


def rounded(value: float) -> float:
    """Rounds to DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")
