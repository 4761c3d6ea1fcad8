"""How much of something passed in any window of time, where one knows of each passage only between when it happened."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Passages = Sequence[tuple[float, float, int]]
"""When each was asked for, when it had ended, and its weight. What was counted happened in between."""


def surely_passed(passages: Passages, window: float) -> int:
    """The largest weight of passages that lie within one window from beginning to end. More than a limit is surely a
    breach of it."""
    begun, ended, weights = _columns(passages)
    return max((int(weights[(begun >= start) & (ended <= start + window)].sum()) for start in begun), default=0)


def passed_by_end(passages: Passages, window: float) -> int:
    """The largest weight of passages that ended within one window. A slow answer may end in a later window than it was
    counted in, so this may exceed a limit that held."""
    _, ended, weights = _columns(passages)
    return max((int(weights[(ended >= start) & (ended < start + window)].sum()) for start in ended), default=0)


def passed_first(passages: Passages, window: float) -> int:
    """The weight of what was asked for in the first window."""
    begun, _, weights = _columns(passages)
    return int(weights[begun < begun.min(initial=np.inf) + window].sum())


def _columns(passages: Passages) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    begun, ended, weights = zip(*sorted(passages), strict=True) if passages else ((), (), ())
    return np.array(begun, np.float64), np.array(ended, np.float64), np.array(weights, np.int64)
