"""Sequences with a sliding window and attention sinks (StreamingLLM; Xiao et al., 2023), and what they still store.

Before a forward the oldest positions behind the sinks are evicted until, with what it appends, at most `window` are
there. Rows keep what is left at consecutive indices, so that they never get longer, whole pages at a time:

    positions   0 … sink - 1 | evicted                       | recent …
    indices     0 … sink - 1 | hole, less than two pages     | recent …
    RoPE        0 … sink - 1                                 | sink …
"""

from dataclasses import dataclass

import numpy as np

from tandem.cache.window import Int64Array


@dataclass(frozen=True)
class Slide:
    """One row before and after an eviction. Places first … end - 1 go; length: the index from which it is written."""

    first: int
    end: int
    length: int
    hole: int
    dropped: int


class StreamTable:
    """Arrays int64 [max_sequences]. windows: positions that may be stored, sinks included; 0 for other sequences.

    holes: indices after the sinks that are not in use. dropped: by how much positions after the sinks are above their
    indices.
    """

    def __init__(self, max_sequences: int, page_size: int) -> None:
        self._page_size = page_size
        self.windows, self.sinks, self.holes, self.dropped = (np.zeros(max_sequences, np.int64) for _ in range(4))
        self.count = 0  # rows with a window

    def enable(self, row: int, window: int, sink: int) -> None:
        self.count += self.windows[row] == 0
        self.windows[row], self.sinks[row] = window, sink

    def reset(self, row: int) -> None:
        self.count -= self.windows[row] != 0
        for array in (self.windows, self.sinks, self.holes, self.dropped):
            array[row] = 0

    def longest(self, row: int, longest_append: int) -> int:
        """The most indices that a row takes up."""
        window, sink = int(self.windows[row]), int(self.sinks[row])
        return max(window, sink + longest_append) + 2 * self._page_size - 2

    def plan_slide(self, row: int, length: int, append: int, *, receive: bool = False) -> Slide | None:
        """What is to be evicted from a row of `length` indices before `append` more; None when nothing is.

        receive: of those appended too, only what later forwards can see is to be stored.
        """
        size, window, sink, hole = self._page_size, *(int(a[row]) for a in (self.windows, self.sinks, self.holes))
        stored = length - hole
        excess = stored + append - window
        evicted = min(excess, excess if receive else max(stored - sink, 0))
        if evicted <= 0:
            return None
        hole += evicted
        first = -(-sink // size)
        end = max((sink + hole) // size, first)
        gone = (end - first) * size
        kept = length if length <= first * size else max(length - gone, first * size)
        return Slide(first, end, kept, hole - gone, int(self.dropped[row]) + gone)

    def find(self, row: int, begin: int, end: int) -> Int64Array:
        """The indices of positions begin … end - 1 of a row; -1 for those evicted."""
        positions = np.arange(begin, end)
        indices = positions - self.dropped[row]
        sink = int(self.sinks[row])
        recent = np.where(indices >= sink + int(self.holes[row]), indices, -1)
        return np.where(positions < sink, positions, recent)

    def indices(self, row: int, length: int) -> Int64Array:
        """Those in use of a row of `length` indices."""
        sink, hole = int(self.sinks[row]), int(self.holes[row])
        return np.arange(length) if hole == 0 else np.concatenate((np.arange(sink), np.arange(sink + hole, length)))
