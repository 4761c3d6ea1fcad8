"""The pages of one layer group as its sequences grow, fork and shrink: first what a change needs, then the change."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tandem.cache.pages.fenced_pages import FencedPages
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.pages.page_users import PageUsers
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.pages.sliding_table import SlidingTable
from tandem.cache.pages.state_snapshots import StateSnapshots
from tandem.cache.pages.step_growth import StepChange
from tandem.cache.plan.arrays import Int32Array, Int64Array, ragged_pairs
from tandem.cache.plan.spans import Paging, Span

NO_PAGES = np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Appends:
    """Rows that are to hold more, seen by queries at `queries` and later, as the groups of one paging see them; int64
    [B] each."""

    rows: Int64Array
    queries: Int64Array
    page_indexes: Int64Array
    """Page index of the next entry."""
    ends: Int64Array
    """The page index after the last, after the append."""
    wanted: Int64Array
    """Page index at which the pages end after the append, or the reservation if it ends later."""
    partial: Int64Array
    """int64: which of the rows use a part of their last page, which another sequence may share."""
    opened: Int64Array
    """int64: which of the rows begin a page."""


def lay_out_appends(
    table: SequenceTable,
    paging: Paging,
    rows: Int64Array,
    lengths: Int64Array,
    new_lengths: Int64Array,
    queries: Int64Array,
) -> Appends:
    """All int64 [B], in positions; rows: of `table`."""
    every, size, reserved = paging.every, paging.reach, table.reserved[rows]
    if every > 1:
        lengths, new_lengths, reserved = lengths // every, new_lengths // every, reserved // every
    page_indexes, ends = lengths // size, (new_lengths + (size - 1)) // size
    used = lengths > page_indexes * size
    partial, opened = (used & table.shortened[rows]).nonzero()[0], (ends > page_indexes + used).nonzero()[0]
    wanted = np.maximum(ends, (reserved + (size - 1)) // size)
    return Appends(rows, queries, page_indexes, ends, wanted, partial, opened)


def _before_borders(appends: Appends, borders: Int64Array) -> Appends:
    """Cuts appends at the rows' borders (page indexes, int64 [B]), for a group that keeps only the positions before
    them. These are written at once, so that no page is partly used."""
    nobody = appends.partial[:0]
    ends, wanted = np.minimum(appends.ends, borders), np.minimum(appends.wanted, borders)
    return replace(appends, ends=ends, wanted=wanted, partial=nobody, opened=nobody)


@dataclass(frozen=True, eq=False)
class PageGrowth:
    """The pages that rows hold after an append: page indexes from begins on. Those from starts on, counts
    of them, are new; int64 [B] each. shown: see GroupTable; begins and shown are None where the group keeps all.

    gone: pages that leave the window. copied, opened: which of the rows get a copy of their shared partial page, and
    which get a new last page. num_pages: how many pages this takes.
    """

    gone: Int32Array
    begins: Int64Array | None
    shown: Int64Array | None
    starts: Int64Array
    counts: Int64Array
    copied: Int64Array
    opened: Int64Array
    num_pages: int


@dataclass(frozen=True, eq=False)
class Ownership:
    """Page indexes of one row: those in `shared` get pages of its own, and it holds pages up to `end`."""

    shared: Int64Array
    end: int
    num_pages: int


@dataclass(frozen=True, eq=False)
class GroupPages:
    """Moves pages of one group in and out of the rows of `table`, and keeps this true of every row:

        page_indexes:  begins           entries // page_size                ends
                 [ full, may be shared ]  [ partial, may be shared ]  [ reserved, its own ]

    Nothing is ever written into a shared page, so only a partial one can be in the way; it is copied before it grows.
    A reserved row with a window drops a page for each that it takes: its budget is enough for ever. What it shares
    counts as well: see PageUsers.
    """

    keeps: Span
    table: GroupTable
    users: PageUsers
    memory: FencedPages
    grain: int  # see Span
    sliding: SlidingTable
    snapshots: StateSnapshots | None = None  # of a group that keeps the last state

    def open(self, row: int) -> None:
        """An empty row begins where its first page will be: after the border, unless the group keeps that side."""
        if not self.keeps.given:
            self.table.begins[row] = self.table.ends[row] = self.table.borders[row]

    def first_page_index(self, query: int, border: int = 0) -> int:
        """Returns the first page index that a query at position `query` needs, in a row with that border."""
        if self.keeps.given:
            return 0
        return max(self.keeps.first_page_index(query, self.table.page_size, self.grain), border)

    def first_page(self, row: int) -> int:
        """The first page of a row's text that no window has dropped, though its positions may be evicted."""
        table = self.table
        return int(table.shown[row] if self.sliding.windows[row] else table.begins[row])

    def pages_needed(self, num_tokens: int, longest_append: int, border: int) -> int:
        """The most pages that a row with that border holds at once; see Span.most_pages."""
        if self.keeps.given:
            return border
        size = self.table.page_size
        return self.keeps.most_pages(max(num_tokens - border * size, 0), longest_append, size, self.grain)

    # Many rows

    def plan_growth(self, appends: Appends) -> PageGrowth:
        """Plans the pages that an append takes."""
        table, rows = self.table, appends.rows
        if self.keeps.given:
            appends = _before_borders(appends, table.borders[rows])
        starts, wanted, partial, opened = table.ends[rows], appends.wanted, appends.partial, appends.opened
        begins, shown, gone = None, None, NO_PAGES
        if self.keeps.drops_past:
            held = table.begins[rows]
            shown = self._first_pages(rows, appends.queries)
            begins = np.maximum(self._page_indexes(rows, shown), held)
            gone = table.held_between(rows, held, np.minimum(begins, starts))
            starts = np.maximum(starts, begins)
            wanted = np.minimum(wanted, np.maximum(begins + table.budgets[rows], appends.ends))
            partial = partial[appends.page_indexes[partial] >= begins[partial]]
            opened = opened[appends.ends[opened] > begins[opened]]
        copied = partial
        if partial.size:
            tails = table.pages[rows[partial], appends.page_indexes[partial]]
            copied = partial[self.users.are_shared(tails)]
        counts = np.maximum(wanted - starts, 0)  # a sliding sequence gives pages back before it takes some
        return PageGrowth(gone, begins, shown, starts, counts, copied, opened, int(counts.sum()) + copied.size)

    def grow(self, appends: Appends, growth: PageGrowth, pages: Int32Array, *, clear: bool) -> None:
        """Carries a growth out with growth.num_pages pages; `gone` is released.

        clear: what stands past a sequence's end in its last page is read, though masked: a new last page is cleared.
        """
        table, rows, copied = self.table, appends.rows, growth.copied
        if pages.size:
            added = pages.size - copied.size
            table.put(rows, growth.starts, growth.counts, pages[:added])
            if copied.size:
                self._replace(rows[copied], appends.page_indexes[copied], pages[added:])
        if growth.begins is not None and growth.shown is not None:
            table.begins[rows], table.shown[rows] = growth.begins, np.maximum(table.shown[rows], growth.shown)
        if pages.size or growth.begins is not None:
            table.ends[rows] = growth.starts + growth.counts
        if clear and growth.opened.size:
            self.clear(rows[growth.opened], appends.ends[growth.opened] - 1)

    def step(self, change: StepChange, pages: Int32Array, *, clear: bool) -> None:
        """Carries a step out with change.num_pages pages; clear: as in grow()."""
        table, rows = self.table, change.rows
        if rows.size:
            if pages.size:
                table.put(rows, change.starts, change.counts, pages)
            table.begins[rows], table.ends[rows] = change.begins, change.starts + change.counts
        if clear and change.opened_rows.size:
            self.clear(change.opened_rows, change.opened_ends)

    def are_leaving(self, rows: Int64Array, queries: Int64Array) -> NDArray[np.bool_]:
        """bool [B]: which rows hold a page that no query at `queries` (int64 [B]) or later needs."""
        return self._page_indexes(rows, self._first_pages(rows, queries)) > self.table.begins[rows]

    def holds(self, rows: Int64Array, page_indexes: Int64Array) -> bool:
        """Whether each row has a page at its page index, both int64 [n]: one that was reserved."""
        return not np.count_nonzero(self.table.ends[rows] <= page_indexes)

    def owns(self, rows: Int64Array, begins: Int64Array, counts: Int64Array, reserved_ends: Int64Array) -> bool:
        """Whether rows hold no page past reserved_ends, and share none of the counts[i] pages from page index
        begins[i] on. All int64 [n]."""
        if np.count_nonzero(self.table.ends[rows] > reserved_ends):
            return False
        pages = self.table.pages[ragged_pairs(rows, begins, counts)]
        return not np.count_nonzero(self.users.are_shared(pages))

    def clear(self, rows: Int64Array, page_indexes: Int64Array) -> None:
        """Clears the pages at these page indexes of rows, both int64 [n], as far as the kernels need it."""
        self.memory.clear_pages(self.table.pages[rows, page_indexes])

    def _first_pages(self, rows: Int64Array, queries: Int64Array) -> Int64Array:
        """The first pages of the texts that are kept for queries at indices `queries` of rows (int64 [B] each)."""
        if self.sliding.count:
            queries = queries + self.sliding.dropped[rows]
        return self.keeps.first_pages(queries, self.table.page_size, self.grain)

    def _page_indexes(self, rows: Int64Array, pages: Int64Array) -> Int64Array:
        """The page indexes of rows that hold `pages` of their texts (int64 [B] each) and later ones."""
        return self.sliding.page_indexes(rows, pages) if self.sliding.count else pages

    # One row

    def plan_ownership(self, row: int, length: int, reserved_end: int, budget: int | None = None) -> Ownership:
        """Plans to give the row its own pages for a reservation, from `length` positions to page index reserved_end.

        budget None: the budget of the row's reservation.
        """
        begin, held = int(self.table.begins[row]), int(self.table.ends[row])
        if self.keeps.given:
            border = int(self.table.borders[row])
            length, reserved_end = min(length, border * self.table.page_size), min(reserved_end, border)
        budget = int(self.table.budgets[row]) if budget is None else budget
        tail = max(length // self.table.paging.positions, begin)
        end = min(begin + budget, reserved_end)
        shared = self._shared(row, tail, min(held, end))
        return Ownership(shared, end, shared.size + max(end - held, 0))

    def own(self, row: int, ownership: Ownership, pages: Int32Array) -> None:
        """Gives a row the pages of an ownership, num_pages of them new."""
        table, shared = self.table, ownership.shared
        added = pages.size - shared.size
        held = int(table.ends[row])
        table.pages[row, held : held + added] = pages[:added]
        table.ends[row] = held + added
        self._replace(np.full(shared.size, row), shared, pages[added:])

    def state_page(self, row: int, length: int) -> Int32Array:
        """int32 [1]: the page with what a row keeps after its first `length` positions, of a group with a page for a
        whole sequence. A snapshot, or the row's own."""
        found = None if self.snapshots is None else self.snapshots.find(row, length)
        return self.table.held(row, 0, 1) if found is None else np.array([found], np.int32)

    def has_state(self, row: int, length: int) -> bool:
        """Whether a row can go back to `length` positions, of a group with states."""
        of = self.snapshots
        if of is None or of.stands_at(row, length):
            return of is not None
        return of.gone_back(row, length) is not None or of.find(row, length) is not None

    def take_back(self, row: int, length: int) -> None:
        """A row gets `length` positions, fewer than it has: of a group with states the one it had there."""
        of = self.snapshots
        if of is None:
            return
        if length and not of.stands_at(row, length):
            before, own = of.gone_back(row, length), self.table.held(row, 0, 1)
            if before is None or before.position == length:
                source = self.state_page(row, length) if before is None else np.array([before.page], np.int32)
                self.memory.copy_pages(source, own)
            else:
                self.memory.compute_again(before.place, length - before.position, before.page, int(own[0]))
        of.cut(row, length)

    def keep_before(self, rows: Int64Array, lengths: Int64Array, appends: Int64Array) -> None:
        """Copies the states of rows with drafts, in a group with states, as they are before the forward. The forward
        grows rows of `lengths` by `appends`, int64 [B] each."""
        assert self.snapshots is not None
        before = self.snapshots.before_drafts(rows, lengths, appends)
        if before:
            own = self.table.pages[rows[[one.place for one in before]], 0]
            self.memory.copy_pages(own, np.array([one.page for one in before], np.int32))

    def cut(self, row: int, end: int) -> Int32Array:
        """Takes away what a row holds from page index `end` on; the pages are the caller's to release."""
        surplus = self.table.held(row, end)
        self.table.ends[row] -= surplus.size
        self.table.num_changes += 1
        return surplus

    def shared_by_fork(self, parent: int, length: int) -> Int32Array:
        """The full pages of a row that a fork of its first `length` positions shares."""
        first = self.first_page_index(length, int(self.table.borders[parent]))
        return self.table.held(parent, first, length // self.table.paging.positions)

    def num_partial(self, length: int) -> int:
        """How many pages `length` positions, an encoder's among them, use a part of: 1 or 0."""
        return int(not self.keeps.given and self.table.paging.ends_in_page(length))

    def fork(self, parent: int, child: int, length: int, copies: Int32Array) -> None:
        """Gives an empty row the first `length` positions of another; its partial page, if any, becomes copies [1]."""
        table, border = self.table, int(self.table.borders[parent])
        first, full = self.first_page_index(length, border), length // table.paging.positions
        if self.keeps.given:
            full = min(full, border)
        if copies.size:
            whole = self.snapshots is not None
            source = self.state_page(parent, length) if whole else table.pages[parent, full : full + 1].copy()
            self.memory.copy_pages(source, copies)
        if self.snapshots is not None:
            self.snapshots.fork(parent, child, length)
        table.pages[child, first:full] = table.pages[parent, first:full]
        table.pages[child, full : full + copies.size] = copies
        table.begins[child], table.ends[child] = first, full + copies.size

    def begin_at(self, row: int, length: int, snapshot: Int32Array, own: Int32Array) -> None:
        """Gives an empty row of a group with states a page of its own, and in it the state of a snapshot; int32 [1]
        both."""
        self.memory.copy_arriving(snapshot, own)
        self.table.pages[row, 0], self.table.begins[row], self.table.ends[row] = own[0], 0, 1
        if self.snapshots is not None:
            self.snapshots.found(row, length, int(snapshot[0]))

    def share(self, row: int, end: int, pages: Int32Array) -> None:
        """Gives an empty row full pages, up to page index `end`, or its border where the group keeps what is before."""
        end = min(end, int(self.table.borders[row])) if self.keeps.given else end
        begin = end - pages.size
        self.table.pages[row, begin:end] = pages
        self.table.begins[row], self.table.ends[row] = begin, end

    def _shared(self, row: int, begin: int, end: int) -> Int64Array:
        return begin + np.flatnonzero(self.users.are_shared(self.table.pages[row, begin:end]))

    def _replace(self, rows: Int64Array, page_indexes: Int64Array, copies: Int32Array) -> None:
        """Replaces shared pages by copies."""
        if copies.size == 0:
            return
        old = self.table.pages[rows, page_indexes]
        self.memory.copy_pages(old, copies)
        self.table.pages[rows, page_indexes] = copies
        self.table.num_changes += 1
        self.users.release(old)
