"""Snapshots of one layer group's states: pages with the state that a sequence had at an earlier position."""

from typing import NamedTuple

import numpy as np

from tandem.cache.pages.page_pools import PagePools
from tandem.cache.pages.prefix_index import NO_PAGE
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.pool_sizes import SnapshotRule
from tandem.cache.plan.tables import NO_WRITES, StateWrites


class Snapshot(NamedTuple):
    """The state after `position` positions. generation: of the page, which gets the next one when the prefix index
    drops it."""

    position: int
    page: int
    generation: int


class BeforeDrafts(NamedTuple):
    """A row before the last forward with drafts. place: in that forward. page: set aside for this row."""

    position: int
    place: int
    page: int


class StateSnapshots:
    """A forward writes a snapshot at each multiple of rule.every, and at the last full page: the next forward that
    fills a page replaces the latter. So a prefix is found at most every - 1 positions before the pages end, and where
    a sequence ends at most page_size - 1.

        keep() ──► held by its sequence ── published() ──► held by the prefix index, which may evict it

    A sequence remembers those that the index holds, and may go back to them as long as they are there.
    """

    def __init__(self, pools: PagePools, group: int, page_size: int, rule: SnapshotRule) -> None:
        self._pools, self._group, self._page_size, self._rule = pools, group, page_size, rule
        self._users = pools.users[group]
        self._before: dict[int, BeforeDrafts] = {}  # by row
        self._behind: dict[int, int] = {}  # by row, where the state of one stands that has grown without it
        self._generations = pools.prefixes.generations[group]
        self._held: dict[int, list[Snapshot]] = {}  # by row, in the order of positions
        self._remembered: dict[int, list[Snapshot]] = {}
        self.num_held = 0
        """Pages that sequences hold."""

    @property
    def num_pages(self) -> int:
        """The number of pages that sequences and the prefix index hold."""
        return self.num_held + int(np.count_nonzero(self._pools.prefixes.indexed[self._group]))

    @property
    def num_evicted(self) -> int:
        """Snapshots that the prefix index has dropped so far."""
        return self._pools.prefixes.num_dropped[self._group]

    def fall_behind(self, rows: Int64Array, lengths: Int64Array) -> None:
        """Notes that rows of `lengths`, int64 [B] both, grow without states."""
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            self._behind.setdefault(row, length)

    def behind(self, rows: Int64Array) -> tuple[int, int] | None:
        """The first of rows (int64 [B]) that has grown without its state, and where that stands; None: no one has."""
        places = (place for place, row in enumerate(rows.tolist()) if row in self._behind) if self._behind else ()
        return next(((place, self._behind[int(rows[place])]) for place in places), None)

    def stands_at(self, row: int, length: int) -> bool:
        """Whether a row's own page has the state after `length` positions, though the row has more."""
        return self._behind.get(row) == length

    def before_drafts(self, rows: Int64Array, lengths: Int64Array, appends: Int64Array) -> list[BeforeDrafts]:
        """Returns the rows from which positions may be taken back, because they get more than one in a forward. It
        grows rows of `lengths` by `appends`, int64 [B] each. The rows' states are to be copied into the pages
        returned."""
        (places,) = (appends > 1).nonzero()
        first = self._pools.num_pages[self._group]
        found = [BeforeDrafts(int(lengths[place]), place, first + at) for at, place in enumerate(places.tolist())]
        self._before = {int(rows[one.place]): one for one in found}
        return found

    def gone_back(self, row: int, length: int) -> BeforeDrafts | None:
        """Returns a row's place before its last forward, if that had drafts and `length` positions reach there."""
        before = self._before.get(row)
        return before if before is not None and before.position <= length else None

    def keep(
        self, rows: Int64Array, lengths: Int64Array, new_lengths: Int64Array, *, drafted: bool = False
    ) -> StateWrites:
        """Sets pages aside for what a forward writes by which rows of `lengths` grow to new_lengths, int64 [B] each.
        Where too few are free, a sequence keeps its last ones. drafted: see Batch; then it keeps those that may be the
        last ones after a pop, too."""
        if self._before and not drafted:
            for row in rows.tolist():
                self._before.pop(row, None)
        size = self._page_size
        crossing = (new_lengths // size > lengths // size).nonzero()[0] if self._rule.most else rows[:0]
        if not crossing.size:
            return NO_WRITES
        writes = []
        for index in crossing.tolist():
            begin = int(lengths[index])
            positions = self._positions(begin, int(new_lengths[index]))
            kept = self._keep(int(rows[index]), positions, spares=1 if drafted else 0)
            writes += [(index, one.position - begin, one.page) for one in kept]
        return StateWrites(*np.array(writes, np.int64).reshape(-1, 3).T)

    def find(self, row: int, position: int) -> int | None:
        """The page with the state of a row after `position` positions; None where there is none."""
        indexed = self._pools.prefixes.indexed[self._group]
        for one in self._held.get(row, ()):
            if one.position == position:
                return one.page
        for one in self._remembered.get(row, ()):
            if one.position == position and indexed[one.page] and self._generations[one.page] == one.generation:
                return one.page
        return None

    def positions(self, row: int) -> list[int]:
        """Returns the positions at which a row has a snapshot."""
        known = {one.position for of in (self._held, self._remembered) for one in of.get(row, ())}
        return [position for position in sorted(known) if self.find(row, position) is not None]

    def to_publish(self, row: int, num_pages: int) -> Int32Array:
        """int32 [num_pages]: at the last page of each prefix whose state the row holds, that state's page; NO_PAGE
        elsewhere."""
        pages = np.full(num_pages, NO_PAGE, np.int32)
        for one in self._held.get(row, ()):
            if one.position <= num_pages * self._page_size:
                pages[one.position // self._page_size - 1] = one.page
        return pages

    def published(self, row: int, num_pages: int) -> None:
        """The prefix index has taken to_publish(), or has the states already."""
        held, indexed = self._held.get(row, []), self._pools.prefixes.indexed[self._group]
        given = [one for one in held if one.position <= num_pages * self._page_size]
        self._release(row, given)
        self._remembered.setdefault(row, []).extend(one for one in given if indexed[one.page])

    def found(self, row: int, position: int, page: int) -> None:
        """Notes that a row begins with the state in a page of the index."""
        self._remembered[row] = [self._snapshot(position, page)]

    def fork(self, parent: int, child: int, length: int) -> None:
        """Gives the child the snapshots in the prefix index of the parent's first `length` positions."""
        self._remembered[child] = [one for one in self._remembered.get(parent, ()) if one.position <= length]

    def cut(self, row: int, length: int) -> None:
        """Forgets snapshots of positions from `length` on of a row."""
        if self._behind.get(row, length) >= length:
            self._behind.pop(row, None)
        if row in self._before and self._before[row].position > length:
            del self._before[row]
        self._release(row, [one for one in self._held.get(row, ()) if one.position > length])
        remembered = self._remembered.get(row, ())
        self._remembered[row] = [one for one in remembered if one.position <= length]

    def drop(self, row: int) -> None:
        """Releases the snapshots of a row that goes."""
        self._release(row, self._held.get(row, []))
        for by_row in (self._held, self._before, self._behind):
            by_row.pop(row, None)
        self._remembered.pop(row, None)

    def _positions(self, begin: int, end: int) -> list[int]:
        """Returns the positions at which a forward from `begin` to `end`, which fills a page, keeps states."""
        every, last = self._rule.every, end // self._page_size * self._page_size
        ticks = list(range((begin // every + 1) * every, end + 1, every))
        return [*ticks, last] if last % every else ticks

    def _keep(self, row: int, positions: list[int], spares: int) -> list[Snapshot]:
        """New snapshots of a row, the last of `positions` that there are pages for. spares: how many of its last full
        pages' before stay."""
        kept = list[Snapshot]()
        passing = [one for one in self._held.setdefault(row, []) if one.position % self._rule.every]
        passing = passing[: len(passing) - spares]
        before = [one for one in self._held[row] if one not in passing]
        spare = [one.page for one in passing]
        for position in reversed(positions):
            page = spare.pop() if spare else self._take()
            if page is None and before:
                page = before.pop(0).page
            if page is None:
                break
            kept.insert(0, self._snapshot(position, page))
        self._held[row] = before + kept
        if spare:
            self._users.release(np.array(spare, np.int32))
            self.num_held -= len(spare)
        return kept

    def _snapshot(self, position: int, page: int) -> Snapshot:
        return Snapshot(position, page, int(self._generations[page]))

    def _take(self) -> int | None:
        if self.num_held >= self._rule.most:
            return None
        page = self._pools.take_spare(self._group)
        self.num_held += page is not None
        return page

    def _release(self, row: int, snapshots: list[Snapshot]) -> None:
        if not snapshots:
            return
        gone = set(snapshots)
        self._held[row] = [one for one in self._held[row] if one not in gone]
        self._users.release(np.array([one.page for one in snapshots], np.int32))
        self.num_held -= len(snapshots)
