"""Draws the times at which requests arrive."""

import math
from collections.abc import Sequence

import numpy as np


def gamma_arrivals(counts: Sequence[int], rate: float, burstiness: float, generator: np.random.Generator) -> np.ndarray:
    """Returns the seconds from the begin of a load to each arrival, float64, ascending. counts: of the load's parts, in
    order.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even, infinity is a constant gap. The gaps of each part are scaled so that it lasts count / rate: the offered
    rate is exact in each part.
    """
    parts = []
    for count in counts:
        gaps = np.ones(count) if math.isinf(burstiness) else generator.gamma(burstiness, 1.0, count)
        if count:
            parts.append(gaps * (count / rate / gaps.sum()))
    return np.cumsum(np.concatenate(parts))


def scaled_arrivals(times: np.ndarray, rate: float | None) -> np.ndarray:
    """Stretches recorded times, in seconds from 0, to a mean of `rate` a second, unless it is None."""
    times = times - times[0]
    if rate is None or times[-1] == 0:
        return times
    return times * ((len(times) - 1) / rate / times[-1])
