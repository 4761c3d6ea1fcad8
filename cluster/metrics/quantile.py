"""Quantiles of histograms."""

from collections.abc import Mapping


def quantile(counts: Mapping[float, float], fraction: float) -> float:
    """Computes PromQL's histogram_quantile: linear within a bucket, and the last bound for what lies beyond it.

    counts: the number of values up to each bound, in the order of the bounds, the last infinite; not all 0.
    """
    bounds = list(counts)
    wanted = fraction * counts[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds[:-1]:
        if counts[bound] >= wanted:
            inside = counts[bound] - below
            return low + (bound - low) * ((wanted - below) / inside if inside else 0.0)
        low, below = bound, counts[bound]
    return low
