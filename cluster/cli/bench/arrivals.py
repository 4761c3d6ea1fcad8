"""When requests arrive."""

import math

import numpy as np


def gamma_arrivals(count: int, rate: float, burstiness: float, generator: np.random.Generator) -> np.ndarray:
    """Seconds from the begin of a load to each of `count` arrivals, float64, ascending.

    The gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even, infinity is a constant gap. All are scaled so that the last arrival is at count / rate, so that the
    offered rate is exact.
    """
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    times = np.cumsum(generator.gamma(burstiness, 1.0, count))
    return times * (count / rate / times[-1])


def scaled_arrivals(times: np.ndarray, rate: float | None) -> np.ndarray:
    """Recorded times, in seconds, from 0; stretched to a mean of `rate` a second unless it is None."""
    times = times - times[0]
    if rate is None or times[-1] == 0:
        return times
    return times * ((len(times) - 1) / rate / times[-1])
