"""What keys have used, in the gateway's table: each process writes a row of its own, and reads all of them.

    row     ids, 1 a slot         slot 0: requests of 64 seconds, tokens of 64 seconds, sums        slot 1 …

The second that a cell counts stands in the cell, so that nobody has to empty the cells of a process that is gone.
Seconds are monotonic, which all processes of a host share: a step of the clock changes nothing.
"""

from collections.abc import Collection
from enum import IntEnum, auto
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.peers.table import KEY_SLOTS, KEY_WIDTH, GatewayTable

RING = 64  # seconds that a slot has cells for
WINDOW = 61  # seconds that count, the one that has just begun included: they hold any 60 s
AHEAD = RING - WINDOW  # seconds: another process may have seen the next one begin
COUNT_BITS = 40
MOST = (1 << COUNT_BITS) - 1  # in a cell
STAMPS = (1 << 23) - 1  # seconds, a season: a cell that old would count again, see tidy()
POSITIONS = np.arange(RING, dtype=np.int64)


class Unit(IntEnum):
    """What is limited."""

    REQUESTS = 0
    TOKENS = 1


class Sum(IntEnum):
    """What is summed for metrics."""

    REQUESTS = 0
    PROMPT_TOKENS = auto()
    OUTPUT_TOKENS = auto()
    REFUSED_REQUESTS = auto()
    REFUSED_TOKENS = auto()
    REFUSED_SIZE = auto()
    REFUSED_MODEL = auto()
    REFUSED_PRIORITY = auto()
    REFUSED_ROUTE = auto()


assert 2 * RING + len(Sum) <= KEY_WIDTH


class Slot(NamedTuple):
    """A key's cells in this process's row, as long as the id stands there."""

    number: int
    id: int


class KeyCells:
    """One process's view. Owned by its event loop."""

    def __init__(self, table: GatewayTable, row: int | None = None) -> None:
        """row: that is written; None: the process's own, -1: that of other hosts."""
        rows = table.keys
        self._fence = table.fence
        self._ids = rows[:, :KEY_SLOTS]
        slots = rows[:, KEY_SLOTS:].reshape(len(rows), KEY_SLOTS, KEY_WIDTH)
        self._rings = slots[:, :, : 2 * RING].reshape(len(rows), KEY_SLOTS, 2, RING)
        self._sums = slots[:, :, 2 * RING : 2 * RING + len(Sum)]
        self._row = table.process if row is None else row
        self._own_ids, self._own_rings = self._ids[self._row], self._rings[self._row]
        self._own_sums = self._sums[self._row]
        assert np.shares_memory(self._rings, rows), "a copy would be seen by nobody"

    def open(self, ids: Collection[int], second: int) -> dict[int, Slot]:
        """A slot for each id: the one that it has, a free one, or that of another id which has not counted for a
        minute. Ids that find none are left out: the row has more than twice as many slots as a file has keys."""
        known = {int(self._own_ids[number]): int(number) for number in np.flatnonzero(self._own_ids)}
        missing = [one for one in ids if one not in known]
        if missing:
            stale = [number for one, number in known.items() if one not in ids and not self._counts(number, second)]
            free = [*stale, *np.flatnonzero(self._own_ids == 0).tolist()]
            for one in missing[: len(free)]:
                known[one] = free.pop()
                self._clear(known[one], one)
        return {one: Slot(known[one], one) for one in ids if one in known}

    def _counts(self, number: int, second: int) -> bool:
        return bool(_live(self._own_rings[number], second).any())

    def _clear(self, number: int, key_id: int) -> None:
        self._own_ids[number] = 0
        self._own_rings[number] = 0
        self._own_sums[number] = 0
        self._own_ids[number] = key_id

    def tidy(self, second: int) -> None:
        """Empties cells that count no more. For now and then, before a cell's second comes around again."""
        for number in np.flatnonzero(self._own_ids):
            self._own_rings[number][_live(self._own_rings[number], second) == 0] = 0

    def window(self, key_id: int, second: int) -> Int64Array:
        """int64 [2, WINDOW]: what all processes and hosts have counted of each Unit, the current second first."""
        return _by_age(self._rings[np.nonzero(self._ids == key_id)], second)

    def add(self, slot: Slot, unit: Unit, amount: int, second: int) -> None:
        """Counts `amount` in a second, unless the slot is another key's by now. Others see it before this returns."""
        if self._own_ids[slot.number] != slot.id:
            return
        ring, position = self._own_rings[slot.number, unit], second % RING
        cell, stamp = int(ring[position]), second & STAMPS
        counted = cell & MOST if cell >> COUNT_BITS == stamp else 0
        ring[position] = stamp << COUNT_BITS | min(counted + amount, MOST)
        self._fence()

    def take_back(self, slot: Slot, unit: Unit, amount: int, second: int) -> None:
        """Counts less in a second that add() counted in, as long as that second counts at all."""
        ring, position = self._own_rings[slot.number, unit], second % RING
        cell, stamp = int(ring[position]), second & STAMPS
        if self._own_ids[slot.number] == slot.id and cell >> COUNT_BITS == stamp:
            ring[position] = stamp << COUNT_BITS | max(0, (cell & MOST) - amount)

    def sum(self, slot: Slot, one: Sum, amount: int = 1) -> None:
        if self._own_ids[slot.number] == slot.id:
            self._own_sums[slot.number, one] += amount

    def sums(self, key_id: int) -> Int64Array:
        """int64 [len(Sum)]: over this host's processes."""
        rows, numbers = np.nonzero(self._ids[:-1] == key_id)
        return self._sums[rows, numbers].sum(0)

    def here(self, second: int) -> tuple[Int64Array, Int64Array]:
        """What this host's processes have counted: ids, [keys], and counts, [keys, 2, WINDOW] as window()."""
        ids = np.unique(self._ids[:-1])
        ids = ids[ids != 0]
        counted = [_by_age(self._rings[np.nonzero(self._ids[:-1] == one)], second) for one in ids]
        return ids, np.array(counted, np.int64).reshape(len(ids), len(Unit), WINDOW)

    def put(self, slot: Slot, window: Int64Array, second: int) -> None:
        """Replaces all counts of a slot. window: as window()."""
        seconds = second - np.arange(WINDOW)
        ring = np.zeros((len(Unit), RING), np.int64)
        ring[:, seconds % RING] = (seconds & STAMPS) << COUNT_BITS | window.clip(0, MOST)
        if self._own_ids[slot.number] == slot.id:
            self._own_rings[slot.number] = ring


def _seconds(second: int) -> Int64Array:
    """int64 [RING]: the second that each position of a ring is for, from WINDOW - 1 s ago to AHEAD s from now."""
    last = second + AHEAD
    return last - ((last - POSITIONS) & (RING - 1))


def _live(cells: Int64Array, second: int) -> Int64Array:
    """[…, RING]: what the cells count that are not too old, 0 in the others."""
    return np.where(cells >> COUNT_BITS == _seconds(second) & STAMPS, cells & MOST, 0)


def _by_age(cells: Int64Array, second: int) -> Int64Array:
    """[2, WINDOW]: the sum of rings, [rings, 2, RING]; the current second first, with those ahead of it."""
    counted = _live(cells, second).sum(0)[:, (second + AHEAD - np.arange(RING)) % RING]
    counted[:, AHEAD] += counted[:, :AHEAD].sum(1)
    return counted[:, AHEAD:]
