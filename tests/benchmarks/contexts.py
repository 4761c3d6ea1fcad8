"""Lengths of a decode batch's rows in stored positions: alike, or mixed as users' are."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST, MOST = 64, 8192  # positions of a lognormal draw
MEDIAN, SIGMA = 850.0, 0.75  # of it: about 1.1K on average

Lengths = NDArray[np.int64]


def _one_long(rows: int) -> Lengths:
    """One row of 8,192 positions, the rest from 423 to 1,123."""
    lengths = np.random.default_rng(0).integers(423, 1124, rows)
    lengths[0] = MOST
    return lengths


def _lognormal(rows: int) -> Lengths:
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, rows)
    return np.clip(drawn, LEAST, MOST).astype(np.int64)


def _half(rows: int) -> Lengths:
    """Half of the rows with 300 positions, half with 4,096."""
    return np.where(np.arange(rows) % 2, 300, 4096)


MIXES: dict[str, Callable[[int], Lengths]] = {
    "mix:one-long": _one_long,
    "mix:lognormal": _lognormal,
    "mix:half": _half,
}


@dataclass(frozen=True)
class Contexts:
    """A number of positions, which all rows have, or a name of MIXES."""

    text: str

    @classmethod
    def parse(cls, text: str) -> "Contexts":
        """Raises ValueError for anything else."""
        if text not in MIXES and not (text.isdecimal() and int(text)):
            raise ValueError(f"contexts are {text!r}; they must be a number of positions or one of {', '.join(MIXES)}")
        return cls(text)

    def lengths(self, rows: int) -> Lengths:
        """int64 [rows], positions; the same at each call."""
        if self.text in MIXES:
            return MIXES[self.text](rows)
        return np.full(rows, int(self.text))

    @property
    def is_mix(self) -> bool:
        return self.text in MIXES

    def alike(self, rows: int) -> "Contexts":
        """Returns the same total number of positions, spread evenly over the rows."""
        return Contexts(str(round(self.lengths(rows).mean())))

    def __str__(self) -> str:
        return self.text
