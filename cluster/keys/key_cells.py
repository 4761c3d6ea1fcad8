"""The counts of keys in the gateway's table: each process writes its own row, and reads all rows.

    row     changes   ids, 1 a slot      slot 0: requests of 64 seconds, tokens of 64 seconds, sums     slot 1 …

A cell holds the second that it counts, so the cells of a process that is gone need no emptying.
Seconds are monotonic, which all processes of a host share: a step of the clock changes nothing.
"""

from collections.abc import Collection, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.peers.key_counts import KeyCounts
from tandem.cluster.peers.table import KEY_SLOTS, KEY_TABLE, KEY_WIDTH, GatewayTable

RING = 64  # seconds that a slot has cells for
WINDOW = 61  # seconds that count, the one that has just begun included: they hold any 60 s
AHEAD = RING - WINDOW  # seconds: another process may have seen the next one begin
COUNT_BITS = 40
MOST = (1 << COUNT_BITS) - 1  # in a cell
STAMPS = (1 << 23) - 1  # seconds, a season: a cell that old would count again, see tidy()
HEAD = 8  # cells of a row before its ids; the first one counts changes of the ids
PART = 64  # slots read at a time: larger arrays get fresh pages, whose faults take longer than counting
POSITIONS = np.arange(RING, dtype=np.int64)


class Unit(IntEnum):
    """The two things that a key has limits of."""

    REQUESTS = 0
    TOKENS = 1


class Sum(IntEnum):
    """The sums that metrics report."""

    REQUESTS = 0
    TOKENS = auto()  # that were counted at first
    PROMPT_TOKENS = auto()
    OUTPUT_TOKENS = auto()
    REFUSED_REQUESTS = auto()
    REFUSED_TOKENS = auto()
    REFUSED_SIZE = auto()
    REFUSED_MODEL = auto()
    REFUSED_PRIORITY = auto()
    REFUSED_ROUTE = auto()


class Pace(IntEnum):
    """The numbers that other hosts' row has in place of sums: how much this host may spend until it hears of other
    hosts again."""

    SECOND = 0  # in which it last heard of other hosts
    MOST_REQUESTS = auto()
    MOST_TOKENS = auto()
    REQUESTS = auto()  # this host's sums then
    TOKENS = auto()


assert 2 * RING + len(Sum) <= KEY_WIDTH
FRESH_SECONDS = 5  # for which a pace holds; without a process that renews it a host counts apart

Places = tuple[Int64Array, Int64Array]
"""Rows, and a slot in each."""


class Slot(NamedTuple):
    """A key's cells in this process's row, as long as the id stands there."""

    number: int
    id: int


class KeyCells:
    """One process's view of the keys' cells. Its event loop owns it."""

    def __init__(self, table: GatewayTable, row: int | None = None) -> None:
        """row: the row that this view writes. None is the process's own, -1 the other hosts'."""
        rows = table.keys
        self._fence = table.fence
        self._table = int(rows[-1, KEY_TABLE])
        self._changes, self._ids = rows[:, 0], rows[:, HEAD : HEAD + KEY_SLOTS]
        slots = rows[:, HEAD + KEY_SLOTS :].reshape(len(rows), KEY_SLOTS, KEY_WIDTH)
        self._rings = slots[:, :, : 2 * RING].reshape(len(rows), KEY_SLOTS, 2, RING)
        self._sums = slots[:, :, 2 * RING : 2 * RING + len(Sum)]
        self._row = table.process if row is None else row
        self._own_ids, self._own_rings = self._ids[self._row], self._rings[self._row]
        self._own_sums = self._sums[self._row]
        self._found: dict[int, Places] = {}  # by ids, as long as no row changes
        self._found_at = -1
        self._second, self._expected = 0, _expected(0)
        assert np.shares_memory(self._rings, rows), "a copy would be seen by nobody"

    def open(self, ids: Collection[int], second: int) -> dict[int, Slot]:
        """Returns a slot for each id: its own, a free one, or one whose id has not counted for a minute. Ids that find
        none are left out: the row has more than twice as many slots as a file has keys."""
        taken = np.flatnonzero(self._own_ids)
        known = dict(zip(self._own_ids[taken].tolist(), taken.tolist(), strict=True))
        missing = [one for one in ids if one not in known]
        if missing:
            counting = _live(self._own_rings[taken], second).any((1, 2))
            silent = self._own_ids[taken[~counting]].tolist()
            stale = [known[one] for one in silent if one not in ids]
            free = [*stale, *np.flatnonzero(self._own_ids == 0).tolist()]
            for one in missing[: len(free)]:
                known[one] = free.pop()
                self._clear(known[one], one)
            self._changes[self._row] += 1
            self._fence()
        return {one: Slot(known[one], one) for one in ids if one in known}

    def _clear(self, number: int, key_id: int) -> None:
        self._own_ids[number] = 0
        self._own_rings[number] = 0
        self._own_sums[number] = 0
        self._own_ids[number] = key_id

    def tidy(self, second: int) -> None:
        """Empties cells that count no more. It has to be called before a cell's second comes around again."""
        taken = np.flatnonzero(self._own_ids)
        rings = self._own_rings[taken]
        self._own_rings[taken] = np.where(_live(rings, second) > 0, rings, 0)

    def window(self, key_id: int, second: int) -> Int64Array:
        """int64 [2, WINDOW]: what all processes and hosts have counted of each Unit, the current second first."""
        return _by_age(_live(self._rings[self._places(key_id)], second).sum(0), second)

    def used(self, key_id: int, second: int) -> list[int]:
        """The sums of window(), at less cost."""
        if second != self._second:
            self._second, self._expected = second, _expected(second)
        counts = self._rings[self._places(key_id)] - self._expected
        counts[counts.view(np.uint64) > MOST] = 0
        return counts.sum((0, 2)).tolist()

    def _places(self, key_id: int) -> "Places":
        """Returns the rows and slots of a key."""
        changes = int(self._changes.sum())
        if changes != self._found_at:
            self._found, self._found_at = {}, changes
        if key_id not in self._found:
            rows, numbers = np.nonzero(self._ids == key_id)
            self._found[key_id] = rows, numbers
        return self._found[key_id]

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
        """Adds to a sum, unless the slot is another key's by now."""
        if self._own_ids[slot.number] == slot.id:
            self._own_sums[slot.number, one] += amount

    def sums(self, key_id: int) -> Int64Array:
        """int64 [len(Sum)]: over this host's processes."""
        rows, numbers = self._places(key_id)
        here = rows < len(self._ids) - 1
        return self._sums[rows[here], numbers[here]].sum(0)

    def all_sums(self, ids: Int64Array) -> Int64Array:
        """int64 [ids, len(Sum)]: as sums() of each id. ids: ascending."""
        totals = np.zeros((len(ids), len(Sum)), np.int64)
        for row in range(len(self._ids) - 1):
            _, ours, theirs = np.intersect1d(ids, self._ids[row], assume_unique=False, return_indices=True)
            totals[ours] += self._sums[row, theirs]
        return totals

    def all_used(self, ids: Int64Array, second: int) -> Int64Array:
        """int64 [ids, 2]: what this host's processes have counted of each Unit in the last minute. ids: ascending."""
        totals = np.zeros((len(ids), len(Unit)), np.int64)
        for row in range(len(self._ids) - 1):
            _, ours, theirs = np.intersect1d(ids, self._ids[row], assume_unique=False, return_indices=True)
            totals[ours] += _live(self._rings[row, theirs], second).sum(-1)
        return totals

    def here(self, second: int) -> KeyCounts:
        """Returns all that this host's processes have counted in the last minute."""
        return self._counted(range(len(self._ids) - 1), second)

    def own(self, second: int) -> KeyCounts:
        """Returns all that this view's row has counted in the last minute."""
        return self._counted([self._row], second)

    def _counted(self, rows: Sequence[int], second: int) -> KeyCounts:
        used = [np.flatnonzero(self._ids[row]) for row in rows]
        owned = [self._ids[row, own] for row, own in zip(rows, used, strict=True)]  # other processes may change them
        ids = np.unique(np.concatenate(owned))
        live = np.zeros((len(ids), len(Unit), RING), np.int64)
        for row, own, names in zip(rows, used, owned, strict=True):
            places = np.searchsorted(ids, names)
            for begin in range(0, len(own), PART):  # a row has an id once, so none is written twice at a time
                part = slice(begin, begin + PART)
                live[places[part]] += _live(self._rings[row, own[part]], second)
        counting = live.any((1, 2))
        return KeyCounts(ids[counting], _by_age(live[counting], second), self._table)

    def put(self, slots: Sequence[Slot], windows: Int64Array, most: Int64Array | None, second: int) -> None:
        """Replaces all counts of these slots, and their paces. Skips slots that have another key now. Only the view of
        other hosts' row may call it.

        slots: ascending by id. windows: [slots, 2, WINDOW], as window(). most: [slots, 2], what this host may spend
        from now on; None: what is left of what it might.
        """
        numbers, ids = np.array(slots, np.int64).reshape(-1, 2).T
        kept = self._own_ids[numbers] == ids
        numbers, ids, windows = numbers[kept], ids[kept], windows[kept]
        seconds = second - np.arange(WINDOW)
        rings = np.zeros((len(ids), len(Unit), RING), np.int64)
        rings[..., seconds % RING] = (seconds & STAMPS) << COUNT_BITS | windows.clip(0, MOST)
        self._own_rings[numbers] = rings
        if most is None:
            return
        sums = self.all_sums(ids)[:, [Sum.REQUESTS, Sum.TOKENS]]
        stamp = np.full((len(ids), 1), second)
        self._own_sums[numbers, : len(Pace)] = np.concatenate((stamp, most[kept], sums), axis=1)

    def is_paced(self, key_id: int, asked: Sequence[int], second: int) -> bool:
        """Returns whether this host must hear of others before it spends this. One request is always free to go."""
        rows, numbers = self._places(key_id)
        if not len(rows) or rows[-1] != len(self._ids) - 1:
            return False
        pace = self._sums[-1, numbers[-1]].tolist()
        if second - pace[Pace.SECOND] > FRESH_SECONDS:
            return False
        sums = self.sums(key_id)
        spent = int(sums[Sum.REQUESTS]) - pace[Pace.REQUESTS], int(sums[Sum.TOKENS]) - pace[Pace.TOKENS]
        most = pace[Pace.MOST_REQUESTS], pace[Pace.MOST_TOKENS]
        return spent[0] > 0 and any(before + ask > limit for before, ask, limit in zip(spent, asked, most, strict=True))


def _expected(second: int) -> Int64Array:
    """int64 [RING]: what a cell of each position holds that counts nothing yet."""
    return (_seconds(second) & STAMPS) << COUNT_BITS


def _seconds(second: int) -> Int64Array:
    """int64 [RING]: the second that each position of a ring is for, from WINDOW - 1 s ago to AHEAD s from now."""
    last = second + AHEAD
    return last - ((last - POSITIONS) & (RING - 1))


def _live(cells: Int64Array, second: int) -> Int64Array:
    """Returns the counts of cells that are not too old, […, RING]; 0 for the others."""
    counts = cells - _expected(second)
    counts *= counts.view(np.uint64) <= MOST
    return counts


def _by_age(live: Int64Array, second: int) -> Int64Array:
    """[…, 2, WINDOW]: what _live() gives, […, 2, RING]; the current second first, with those ahead of it."""
    newest = (second + AHEAD) % RING
    counted = np.concatenate((live[..., newest::-1], live[..., :newest:-1]), axis=-1)
    counted[..., AHEAD] += counted[..., :AHEAD].sum(-1)
    return counted[..., AHEAD:]
