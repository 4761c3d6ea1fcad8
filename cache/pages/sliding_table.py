"""Sequences with a sliding window and attention sinks (StreamingLLM; Xiao et al., 2023), and what they still store.

Before a forward the oldest positions after the sinks are evicted until, with what it appends, at most `window` are
there. Rows that evict after a forward do so until `window` are there without what the next one appends. Rows keep what
is left at consecutive indices, so that they never get longer, whole pages at a time:

    positions   0 … sink - 1 | evicted                       | recent …
    indices     0 … sink - 1 | hole, less than two pages     | recent …
    RoPE        0 … sink - 1                                 | sink …

While a step may still run, the pages that it sees stay in the hole for another step.
"""

from dataclasses import dataclass

import numpy as np

from tandem.cache.kernels.torch.sliding import SlidingRows
from tandem.cache.plan.arrays import Int64Array, ragged_range
from tandem.cache.plan.spans import Sliding


@dataclass(frozen=True, eq=False)
class Slides:
    """The positions that some rows (distinct) evict, and the rows' state afterwards. holes: int64 [n], like rows.
    `moved` are the rows that lose page indexes firsts … ends - 1, with their lengths and dropped, int64 [m] each.

    lengths: the index from which a row is written then.
    """

    rows: Int64Array
    holes: Int64Array
    moved: Int64Array
    firsts: Int64Array
    ends: Int64Array
    lengths: Int64Array
    dropped: Int64Array


class SlidingTable:
    """Arrays [max_sequences], int64. windows: positions that may be stored, sinks included; 0 for other sequences.

    holes: indices after the sinks that are not in use. dropped: by how much positions after the sinks are above their
    indices. rotated: K of positions before it is stored rotated. evict_after (bool): rows evict after a forward.
    """

    def __init__(self, max_sequences: int, page_size: int) -> None:
        self._page_size = page_size
        arrays = (np.zeros(max_sequences, np.int64) for _ in range(5))
        self.windows, self.sinks, self.holes, self.dropped, self.rotated = arrays
        self.evict_after = np.zeros(max_sequences, np.bool_)
        self.count = 0  # rows with a window

    def sliding(self, row: int) -> Sliding | None:
        """How a row slides; None where it does not, and all its K is rotated."""
        if self.windows[row] == 0:
            return None
        after, rotated = bool(self.evict_after[row]), int(self.rotated[row])
        return Sliding(int(self.windows[row]), int(self.sinks[row]), after, rotated)

    def enable(self, row: int, sliding: Sliding) -> None:
        self.count += self.windows[row] == 0
        self.windows[row], self.sinks[row], self.evict_after[row], self.rotated[row] = sliding

    def reset(self, row: int) -> None:
        self.count -= self.windows[row] != 0
        for array in (self.windows, self.sinks, self.holes, self.dropped, self.rotated, self.evict_after):
            array[row] = 0

    def longest(self, row: int, longest_append: int) -> int:
        """The most indices that a row takes up."""
        window, sink = int(self.windows[row]), int(self.sinks[row])
        most = window + longest_append if self.evict_after[row] else max(window, sink + longest_append)
        return most + 2 * self._page_size - 1

    def plan_slides(
        self,
        rows: Int64Array,
        lengths: Int64Array,
        appends: Int64Array,
        *,
        receive: bool = False,
        in_flight: bool = False,
    ) -> Slides | None:
        """Plans what to evict from rows of `lengths` indices before `appends` more (int64 [B] each). None: nothing.

        receive: of the appended positions, too, only what later forwards can see is stored. in_flight: pages that were
        seen before the call are kept.
        """
        sliding = self.windows[rows].nonzero()[0]
        if sliding.size == 0:
            return None
        rows, lengths, size = rows[sliding], lengths[sliding], self._page_size
        holes, sinks = self.holes[rows], self.sinks[rows]
        stored, added = lengths - holes, appends[sliding]
        if not receive:
            added = np.where(self.evict_after[rows], 0, added)
        evicted = stored + added - self.windows[rows]
        if not receive:
            evicted = np.minimum(evicted, stored - sinks)
        before, holes = holes, holes + np.maximum(evicted, 0)
        firsts, ends = -(-sinks // size), (sinks + (before if in_flight else holes)) // size
        moving = (ends > firsts).nonzero()[0]
        if moving.size == 0:
            return Slides(rows, holes, *[moving] * 5)
        moved, firsts, ends, lengths = rows[moving], firsts[moving], ends[moving], lengths[moving]
        gone = (ends - firsts) * size
        holes[moving] -= gone
        kept = np.minimum(lengths, np.maximum(lengths - gone, firsts * size))
        return Slides(rows, holes, moved, firsts, ends, kept, self.dropped[moved] + gone)

    def rows(self, rows: Int64Array, lengths: Int64Array, max_positions: int) -> SlidingRows:
        """Returns the standing in a forward of rows of `lengths` indices (int64 [B] each). Those without a window are
        rotated as they are stored. max_positions: rows of the table of rotations but the last."""
        slides, sinks, holes, dropped = self.windows[rows] > 0, self.sinks[rows], self.holes[rows], self.dropped[rows]
        turned = np.where(slides, self.rotated[rows], lengths)
        indices = np.where(slides, lengths - holes - 1, max_positions)
        positions = np.where(slides, np.minimum(lengths + dropped, max_positions) - 1, max_positions)
        return SlidingRows(sinks, holes, np.minimum(turned, sinks), turned - dropped, indices, positions, max_positions)

    def find(self, row: int, begin: int, end: int) -> Int64Array:
        """The indices of positions begin … end - 1 of a row; -1 for those evicted."""
        positions = np.arange(begin, end)
        indices = positions - self.dropped[row]
        sink = int(self.sinks[row])
        recent = np.where(indices >= sink + int(self.holes[row]), indices, -1)
        return np.where(positions < sink, positions, recent)

    def indices_of(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """int64 [n]: where rows[i] stores positions[i], which it has not evicted."""
        return np.where(positions < self.sinks[rows], positions, positions - self.dropped[rows])

    def places(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """int64 [n, …]: how many entries before positions[i] (int64 [n, …]) rows[i] stores, all indices in use."""
        shape = (-1, *[1] * (positions.ndim - 1))
        sinks, gone = self.sinks[rows].reshape(shape), (self.dropped[rows] + self.holes[rows]).reshape(shape)
        return np.minimum(positions, np.maximum(positions - gone, sinks))

    def page_indexes(self, rows: Int64Array, pages: Int64Array) -> Int64Array:
        """int64 [n]: the page index in rows[i] from which on it has what it stores of positions
        pages[i] · page_size and later."""
        sinks, gone = self.sinks[rows], self.dropped[rows] // self._page_size
        of_recent = np.maximum(pages - gone, sinks // self._page_size)
        return np.where(pages * self._page_size < sinks, pages, of_recent)

    def in_use(self, rows: Int64Array, lengths: Int64Array) -> Int64Array:
        """int64: the indices that rows of `lengths` (int64 [n] each) use, one row after another."""
        holes = self.holes[rows]
        counts = lengths - holes
        indices = ragged_range(0, counts)
        return indices + (indices >= self.sinks[rows].repeat(counts)) * holes.repeat(counts)
