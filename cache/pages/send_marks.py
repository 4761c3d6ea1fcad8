"""Sequences whose KV also goes to another worker: where to, and how far that has come."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.cache.pages.map_slots import MapSlots
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import PositionMap


@dataclass(frozen=True, eq=False)
class Sent:
    """How far the maps of some rows will have been issued when a forward ends; int64 [n] each.

    serials: of the marks, for a row may have another by then.
    """

    rows: Int64Array
    serials: Int64Array
    ends: Int64Array


class SendMarks:
    """One mark a row of the sequence table at most, as arrays int64 [max_sequences]: positions begins … ends - 1 go to
    target_pes, to the slots in `slots`. planned and issued: positions below are in a plan, respectively written by a
    forward that ended. All are 0 without a mark; one that is used up stays as a count until its sequence goes.
    """

    def __init__(self, every: Sequence[int], max_sequences: int) -> None:
        """every: positions of an entry of each layer group."""
        arrays = (np.zeros(max_sequences, np.int64) for _ in range(6))
        self.target_pes, self.begins, self.ends, self.planned, self.issued, self._serials = arrays
        self.every = tuple(every)
        self.slots = MapSlots(len(self.every), max_sequences)
        self.count = 0  # rows with a mark
        self._last_serial = 0

    def add(self, sequence: int, row: int, position_map: PositionMap, target_pe: int, held_from: Sequence[int]) -> None:
        """Marks the row of a sequence. Each group holds its positions from held_from on.

        Replaces a mark that is used up; InvalidArgument when it has one that is not, and for a map that does not fit.
        """
        _check_map(position_map, self.every, held_from)
        if self.planned[row] < self.ends[row]:
            raise InvalidArgument(
                f"sequence {sequence} is marked already, up to position {self.ends[row]}; it may be once"
            )
        self.count += int(self.ends[row] == 0)
        self._last_serial += 1
        self.slots.put(row, position_map)
        self.target_pes[row], self._serials[row] = target_pe, self._last_serial
        self.begins[row], self.ends[row] = position_map.start_position, position_map.end_position
        self.planned[row] = self.issued[row] = position_map.start_position

    def drop(self, row: int) -> None:
        self.count -= int(self.ends[row] != 0)
        self.slots.drop(row)
        for array in (self.target_pes, self.begins, self.ends, self.planned, self.issued, self._serials):
            array[row] = 0

    def num_sent(self, row: int) -> int:
        return int(self.issued[row] - self.begins[row])

    def num_slots_sent(self, row: int) -> list[int]:
        """Counts for each group the sent entries of a row that have a slot."""
        begin, end = int(self.begins[row]), int(self.issued[row])
        return self.slots.num_wanted(row, [end // one - begin // one for one in self.every])

    def first_unsent(self, row: int, group: int, end: int) -> int | None:
        """The first position before `end` that a group's receiver wants and no forward was planned to send; of a group
        with an entry for each position."""
        begin, end = int(self.planned[row]), min(end, int(self.ends[row]))
        wanted = self.slots.wanted(row, group, *(position - int(self.begins[row]) for position in (begin, end)))
        return begin + int(wanted[0]) if wanted.size else None

    def any_open(self, rows: Int64Array | int) -> bool:
        """Whether the map of one of the rows has positions that were not issued."""
        return self.count > 0 and bool((self.issued[rows] < self.ends[rows]).any())

    def rewind(self, row: int, length: int) -> None:
        """Positions from `length` on were popped: what replaces them is sent again, unless the map was used up."""
        if self.planned[row] < self.ends[row]:
            self.planned[row] = max(self.begins[row], min(self.planned[row], length))
            self.issued[row] = min(self.issued[row], self.planned[row])

    def take(self, rows: Int64Array, ends: Int64Array) -> Sent:
        """Positions of distinct marked rows up to `ends` (int64 [n]), not below planned, are planned from now on."""
        self.planned[rows] = ends
        return Sent(rows, self._serials[rows], ends)

    def commit(self, sent: Sent | None) -> None:
        """Counts as issued what was sent; None: nothing."""
        if sent is None:
            return
        same = self._serials[sent.rows] == sent.serials
        rows, ends = sent.rows[same], sent.ends[same]
        self.issued[rows] = np.minimum(np.maximum(self.issued[rows], ends), self.planned[rows])


def _check_map(position_map: PositionMap, every: tuple[int, ...], held_from: Sequence[int]) -> None:
    if position_map.num_tokens == 0:
        raise InvalidArgument("the position map has no positions; it must have at least 1")
    if len(position_map.runs) != len(held_from):
        raise InvalidArgument(
            f"the position map has {len(position_map.runs)} layer groups; the layout has {len(held_from)}"
        )
    if not position_map.fits(every):
        raise InvalidArgument(
            f"the position map is for entries of {position_map.every} positions in the layer groups; {every} are those "
            "of the layout"
        )
    for group, (runs, held) in enumerate(zip(position_map.runs, held_from, strict=True)):
        first = position_map.start_position + runs.num_skipped
        if first < held:
            raise InvalidArgument(
                f"the position map asks for position {first} of layer group {group}; those before {held} have left "
                "its window"
            )
