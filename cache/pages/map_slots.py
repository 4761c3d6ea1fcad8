"""The slots of the position maps of a cache's sequences, side by side: a forward looks up all that it needs at once."""

from collections.abc import Sequence

import numpy as np

from tandem.cache.plan.arrays import Int32Array, Int64Array, ragged_range
from tandem.cache.plan.position_map import SKIP, PositionMap

FIRST_CAPACITY = 1024


class MapSlots:
    """Position maps by row, at most one each. slots: int32 [groups, capacity]; slots[g, offsets[row] + i] is where
    group g's receiver wants the i-th entry of the row's map, SKIP if nowhere; counts[row] positions, 0 without a map
    (int64 [max_sequences] each). There are no more entries than positions."""

    def __init__(self, num_groups: int, max_sequences: int) -> None:
        self.slots: Int32Array = np.empty((num_groups, FIRST_CAPACITY), np.int32)
        self.offsets = np.zeros(max_sequences, np.int64)
        self.counts = np.zeros(max_sequences, np.int64)
        self._end = 0  # of what was ever put since the last move

    def put(self, row: int, position_map: PositionMap) -> None:
        """Puts a map in place of the row's last one."""
        self.counts[row] = 0
        if self._end + position_map.num_tokens > self.slots.shape[1]:
            self._move(position_map.num_tokens)
        begin, self._end = self._end, self._end + position_map.num_tokens
        for slots, runs in zip(self.slots, position_map.runs, strict=True):
            slots[begin : begin + runs.num_tokens] = runs.slots()
        self.offsets[row], self.counts[row] = begin, position_map.num_tokens

    def drop(self, row: int) -> None:
        self.counts[row] = 0

    def wanted(self, row: int, group: int, begin: int, end: int) -> Int64Array:
        """Returns which of the entries begin … end - 1 of a row's map a group's receiver wants, counted from
        `begin`."""
        offset = int(self.offsets[row])
        return np.flatnonzero(self.slots[group, offset + begin : offset + max(begin, end)] != SKIP)

    def num_wanted(self, row: int, counts: Sequence[int]) -> list[int]:
        """Counts for each group the entries that are not skipped among the first counts[group] of a row's map."""
        begin = int(self.offsets[row])
        of_groups = zip(self.slots, counts, strict=True)
        return [int(np.count_nonzero(slots[begin : begin + count] != SKIP)) for slots, count in of_groups]

    def _move(self, room: int) -> None:
        """Moves all maps together, and makes the array large enough that this stays rare."""
        rows = self.counts.nonzero()[0]
        counts = self.counts[rows]
        self._end = int(counts.sum())
        moved = np.empty((self.slots.shape[0], max(2 * (self._end + room), FIRST_CAPACITY)), np.int32)
        moved[:, : self._end] = self.slots[:, ragged_range(self.offsets[rows], counts)]
        self.slots = moved
        self.offsets[rows] = np.cumsum(counts) - counts
