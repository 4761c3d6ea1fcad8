"""Distributions of the lengths of prompts and outputs."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from tandem.cluster.errors import UsageError

FORMS = "fixed:TOKENS, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA:CAP or either:LOW:HIGH:SHARE"
MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers of tokens, from `low` to `high`, both included.

    With a sigma the logarithm is normal around that of `median`, and larger numbers become `high`. With a share that
    fraction has `high` tokens and the others have `low`. With neither the distribution is uniform.
    """

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None
    share: float | None = None

    @classmethod
    def fixed(cls, tokens: int) -> Self:
        return cls(tokens, tokens)

    @classmethod
    def uniform(cls, low: int, high: int) -> Self:
        return cls(low, high)

    @classmethod
    def lognormal(cls, median: float, sigma: float, cap: int) -> Self:
        return cls(1, cap, median, sigma)

    @classmethod
    def either(cls, low: int, high: int, share: float) -> Self:
        return cls(low, high, share=share)

    @classmethod
    def parse(cls, name: str, text: str) -> Self:
        """Parses one of FORMS. UsageError, which calls it `name`, for anything else."""
        kind, *numbers = text.split(":")
        try:
            if kind == "fixed" and len(numbers) == 1:
                lengths = cls.fixed(int(numbers[0]))
            elif kind == "uniform" and len(numbers) == 2:
                lengths = cls.uniform(int(numbers[0]), int(numbers[1]))
            elif kind == "lognormal" and len(numbers) == 3:
                lengths = cls.lognormal(float(numbers[0]), float(numbers[1]), int(numbers[2]))
            elif kind == "either" and len(numbers) == 3:
                lengths = cls.either(int(numbers[0]), int(numbers[1]), float(numbers[2]))
            else:
                raise ValueError
            if not (1 <= lengths.low <= lengths.high <= MOST_TOKENS):
                raise ValueError
            if lengths.sigma is not None and not (1 <= lengths.median <= lengths.high and 0 <= lengths.sigma <= 10):
                raise ValueError
            if lengths.share is not None and not 0 <= lengths.share <= 1:
                raise ValueError
        except ValueError:
            raise UsageError(
                f"{name} is {text!r:.80}; it must be {FORMS}, with 1 ≤ LOW ≤ HIGH ≤ {MOST_TOKENS}, MEDIAN ≤ CAP, "
                "0 ≤ SIGMA ≤ 10 and 0 ≤ SHARE ≤ 1"
            ) from None
        return lengths

    def sample(self, generator: np.random.Generator) -> int:
        """Draws one length."""
        if self.low == self.high:
            return self.low
        if self.share is not None:
            return self.high if generator.random() < self.share else self.low
        if self.sigma is None:
            return int(generator.integers(self.low, self.high, endpoint=True))
        drawn = self.median * np.exp(self.sigma * generator.standard_normal())
        return int(min(max(self.low, round(drawn)), self.high))

    def __str__(self) -> str:
        if self.sigma is not None:
            return f"lognormal:{self.median:g}:{self.sigma:g}:{self.high}"
        if self.share is not None:
            return f"either:{self.low}:{self.high}:{self.share:g}"
        return f"fixed:{self.low}" if self.low == self.high else f"uniform:{self.low}:{self.high}"
