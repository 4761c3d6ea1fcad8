"""A model of how long steps take on this device, fitted to what they took."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

KNEE = 128  # tokens of a forward; fewer are computed while the weights are read
# Seconds of a forward, a token, a token beyond KNEE, a position that a row reads, a position that a prompt token
# attends to. Before any was measured they are those of a slow GPU, so that first chunks are short.
PRIOR = (5e-3, 1e-5, 4e-5, 5e-8, 2e-9)
FIRST_RATE = 1 / (PRIOR[1] + PRIOR[2])  # prompt tokens a second of long forwards, before any was measured
PRIOR_WEIGHT = 0.01  # of a measured step
CLASSES = 16  # of chunks and of rows, by powers of two
KEPT = 8  # the newest steps of each pair of classes
MOST_RATIO = 2.0  # of the model, or its inverse: after a pause of the host the next step seems to take no time
LEAST_SECONDS = 1e-5  # of a step
FADING = 0.99  # at each fit: the weight of a step that no other of its classes has replaced
RECENT = 128  # steps with chunks, whose times the excess is taken from
FEW = 32  # of them, with which excess and model are trusted
FIRST_EXCESS = 1.1
FIT_STEPS = 32  # from one fit to the next
NUM_TERMS = len(PRIOR)


class StepLoad(NamedTuple):
    """The work of a device between the tokens of one step and of the next. Tokens include padding.

    rows: tokens of decode rows. positions: of KV that rows read. joint: prompt tokens in the forward of the rows.
    forwards, apart: forwards of prompts by themselves, and their tokens. pairs: of a prompt token and a position that
    it attends to, in all forwards.
    """

    rows: int = 0
    positions: int = 0
    joint: int = 0
    forwards: int = 0
    apart: int = 0
    pairs: int = 0

    @property
    def chunk(self) -> int:
        """Prompt tokens."""
        return self.joint + self.apart

    def plus(self, other: "StepLoad") -> "StepLoad":
        return StepLoad(*(one + another for one, another in zip(self, other, strict=True)))


NOTHING = StepLoad()


class StepTime:
    """Seconds of a step: a constant for each forward, which reads the weights, and a rate for each of the terms above.
    Pure: it is told times, and reads no clock. Owned by the step thread.

    A least-squares fit of relative errors, with no coefficient below zero. It uses the newest steps of each size of
    chunk and rows, so a steady load does not make it forget others. Rates that the steps do not determine stay near the
    prior.
    """

    def __init__(self, share: float) -> None:
        """share: of steps with chunks that take at most `excess` times what the model says."""
        self.excess = FIRST_EXCESS
        """The quantile at `share` of measured over modelled seconds, of late."""
        self.largest_chunk = 0
        """Prompt tokens of the largest step so far: what much larger ones take is a guess."""
        self._share = share
        self._rates = PRIOR
        self._prior = np.array(PRIOR)
        # Terms as the prior has them and measured seconds, all over what the model says: a factor for each is fitted.
        self._kept = np.zeros((CLASSES * CLASSES * KEPT, NUM_TERMS + 1))
        self._places: dict[tuple[int, int], int] = {}  # of each pair of classes that there were, among all of them
        self._next = [0] * (CLASSES * CLASSES)  # of each place, which of its steps the next one replaces
        self._recent = np.zeros((RECENT, NUM_TERMS + 1))
        self._num_recent = 0  # so far
        self._steps, self._fitted = 0, 0  # measured so far; of them when it was fitted last

    def seconds(self, load: StepLoad) -> float:
        """Returns the seconds of a step by the model."""
        forward, token, beyond, position, pair = self._rates
        forwards, tokens, tokens_beyond, positions, pairs = _terms(load)
        return forward * forwards + token * tokens + beyond * tokens_beyond + position * positions + pair * pairs

    def beside(self, rows: int, positions: int, context: int, *, joint: bool) -> Callable[[int], float]:
        """seconds() of rows by the tokens of a chunk with them, all with padding, for a search among sizes. context:
        tokens before the chunk."""
        forward, token, beyond, position, pair = self._rates
        known = forward + token * rows + position * positions
        over = rows - KNEE
        if not joint:
            known, over = known + forward + beyond * max(over, 0), -KNEE

        def seconds(tokens: int) -> float:
            pairs = tokens * (context + (tokens + 1) / 2)
            return known + token * tokens + beyond * max(over + tokens, 0) + pair * pairs

        return seconds

    def measured(self, seconds: float, load: StepLoad) -> None:
        """Fits the model to a measured step."""
        modelled = self.seconds(load)
        scale = max(seconds, modelled / 10, LEAST_SECONDS) if self._steps < FEW else max(modelled, LEAST_SECONDS)
        row = [term * prior / scale for term, prior in zip(_terms(load), PRIOR, strict=True)]
        row.append(min(max(seconds / scale, 1 / MOST_RATIO), MOST_RATIO))
        classes = min(load.chunk.bit_length(), CLASSES - 1), min(load.rows.bit_length(), CLASSES - 1)
        place = self._places.setdefault(classes, len(self._places))
        self._kept[KEPT * place + self._next[place]] = row
        self._next[place] = (self._next[place] + 1) % KEPT
        self._steps += 1
        if load.chunk:
            self._recent[self._num_recent % RECENT] = row
            self._num_recent += 1
            self.largest_chunk = max(self.largest_chunk, load.chunk)

    def fit(self) -> None:
        """Fits the model to the steps measured since the last time, if they are many enough. Some 100 µs."""
        if self._steps - self._fitted < min(FIT_STEPS, 1 + self._fitted // 4):
            return
        self._fitted = self._steps
        kept = self._kept[: KEPT * len(self._places)]
        products = kept.T @ kept
        kept *= FADING
        factors = _not_negative(products[:-1, :-1], products[:-1, -1])
        forward, token, beyond, position, pair = (factors * self._prior).tolist()
        self._rates = forward, token, beyond, position, pair
        if self._num_recent:
            recent = self._recent[: self._num_recent]
            ratios = recent[:, -1] / np.maximum(recent[:, :-1] @ factors, LEAST_SECONDS)
            excess = float(np.quantile(ratios, self._share))
            self.excess = excess if self._num_recent >= FEW else max(excess, FIRST_EXCESS)


def _terms(load: StepLoad) -> tuple[int, int, int, int, int]:
    rows, positions, joint, forwards, apart, pairs = load
    together = rows + joint
    beyond = max(together - KNEE, 0) + max(apart - KNEE * forwards, 0)
    return forwards + (together > 0), together + apart, beyond, positions, pairs


def _not_negative(products: Float64Array, targets: Float64Array) -> Float64Array:
    """Factors float64 [n], at least 0, that solve the normal equations, float64 [n, n] and [n], with a prior of 1."""
    products = products + PRIOR_WEIGHT * np.eye(targets.size)
    targets = targets + PRIOR_WEIGHT
    factors, free = np.zeros(targets.size), np.arange(targets.size)
    while free.size:
        found = np.linalg.solve(products[np.ix_(free, free)], targets[free])
        if (found >= 0).all():
            factors[free] = found
            break
        free = free[found > 0]
    return factors
