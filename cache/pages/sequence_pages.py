"""Which pages the sequences of a cache hold, in all its layer groups at once."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.cache.kernels.base import PageOperations
from tandem.cache.pages.group_pages import GroupPages, Ownership, lay_out_appends
from tandem.cache.pages.page_pools import PageIds, PagePools
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.layout import KVLayout


class SequencePages:
    """Moves pages between `pools` and the rows of `table`. A call changes every group or, with OutOfPages, none."""

    def __init__(
        self, layout: KVLayout, table: SequenceTable, pools: PagePools, memory: Sequence[PageOperations]
    ) -> None:
        """memory: what moves the pages of each layer group."""
        self._table = table
        self._pools = pools
        self._groups = [
            GroupPages(kind.keeps, group, pool, mover)
            for kind, group, pool, mover in zip(layout.groups, table.groups, pools.allocators, memory, strict=True)
        ]
        self._page_size = table.page_size
        self._dropping = [group for group in self._groups if group.keeps.drops_past]
        self._growing = [group for group in self._groups if not group.keeps.given]

    def open(self, row: int) -> None:
        """A row was added, which is empty."""
        for group in self._groups if self._table.borders[row] else ():
            group.open(row)

    def needed(self, num_tokens: int, longest_append: int, border: int = 0) -> tuple[int, ...]:
        """Per group the most pages that a sequence of num_tokens positions, appended in pieces, holds at once. border:
        see SequenceTable."""
        return tuple(group.pages_needed(num_tokens, longest_append, border) for group in self._groups)

    def first_position(self, row: int) -> int:
        """The first position that every group holds."""
        return max(int(group.table.begins[row]) for group in self._groups) * self._page_size

    def check_held(self, what: str, row: int, length: int) -> None:
        """InvalidArgument unless every group holds what a query at position `length` sees."""
        border = int(self._table.borders[row])
        if length < border * self._page_size:
            raise InvalidArgument(
                f"{what} would have {length} positions; an encoder's come whole: at least {border * self._page_size} "
                "are accepted"
            )
        for index, group in enumerate(self._groups):
            begin = int(group.table.begins[row])
            if group.first_page_index(length, border) < begin:
                lengths = range(int(self._table.lengths[row]) + 1)
                least = bisect_left(lengths, begin, key=group.first_page_index)
                raise InvalidArgument(
                    f"{what} would have {length} positions, but those before {begin * self._page_size} have left the "
                    f"window of layer group {index}; at least {least} are accepted"
                )

    def check_unsent(self, seq_ids: Sequence[int], rows: Int64Array, marks: SendMarks) -> None:
        """InvalidArgument where growing would let go of positions that a row is to send and has not: a group with a
        window knows only what later queries see."""
        if not self._dropping or marks.count == 0:
            return
        lengths = self._table.lengths[rows]
        for index in (marks.planned[rows] < np.minimum(marks.ends[rows], lengths)).nonzero()[0].tolist():
            for number, group in enumerate(self._groups):
                kept = group.first_page_index(int(lengths[index])) * self._page_size
                position = marks.first_unsent(int(rows[index]), number, kept)
                if position is not None:
                    raise InvalidArgument(
                        f"sequence {seq_ids[index]} is to send position {position}, which would leave the window of "
                        f"layer group {number}; send_cached sends it first"
                    )

    def grow(
        self,
        rows: Int64Array,
        lengths: Int64Array,
        new_lengths: Int64Array,
        queries: Int64Array,
        gone: PageIds,
        *,
        clear: bool = True,
    ) -> None:
        """Gives rows of `lengths` the pages for new_lengths, writable from `lengths` on, and takes those away that no
        query at positions `queries` or later sees; OutOfPages changes nothing.

        All int64 [B]; rows are distinct. gone: further pages to be released. clear: whether new last pages are cleared.
        """
        appends = lay_out_appends(self._table, rows, lengths, new_lengths, queries)
        growths = [group.plan_growth(appends) for group in self._groups]
        gone = tuple(
            np.concatenate((growth.gone, ids)) if ids.size else growth.gone
            for growth, ids in zip(growths, gone, strict=True)
        )
        pages = self._pools.exchange(gone, [growth.num_pages for growth in growths])
        for group, growth, ids in zip(self._groups, growths, pages, strict=True):
            group.grow(appends, growth, ids, clear=clear)
        self._table.lengths[rows], self._table.shortened[rows] = new_lengths, False

    def clear_next(self, rows: Int64Array, *, clear: bool = True) -> bool:
        """Clears the pages that rows (int64 [B], each full to a page's end) begin next, where all are reserved; else
        False. clear: whether they are cleared."""
        page_indexes = self._table.lengths[rows] // self._page_size
        if not all(group.holds(rows, page_indexes) for group in self._growing):
            return False
        for group in self._growing if clear and rows.size else ():
            group.clear(rows, page_indexes)
        return True

    def step(
        self,
        rows: Int64Array,
        lengths: Int64Array,
        new_lengths: Int64Array,
        queries: Int64Array,
        gone: PageIds,
        slid: NDArray[np.bool_] | None,
        *,
        each_one: bool,
        clear: bool,
    ) -> None:
        """As grow() of rows that were not shortened, whose partial pages so are their own: something changes only where
        one begins a page, a page leaves a window, or a sequence has slid: those in `slid` (bool [B]; None: none).

        each_one: whether each grows by one position."""
        size = self._page_size
        changing = lengths % size == 0 if each_one else (new_lengths - 1) // size > (lengths - 1) // size
        if slid is not None:
            changing |= slid
        for group in self._dropping:
            changing |= group.are_leaving(rows, queries)
        changed = changing.nonzero()[0]
        if changed.size:
            which, began = rows[changed], lengths[changed]
            alone = each_one and slid is None and not self._dropping
            if not alone or not self.clear_next(which, clear=clear):
                self.grow(which, began, new_lengths[changed], queries[changed], gone)
        self._table.lengths[rows] = new_lengths

    def reserve(self, row: int, num_tokens: int, longest_append: int) -> None:
        """Makes sure that a row can always grow to num_tokens positions; OutOfPages changes nothing."""
        reserved = -(-num_tokens // self._page_size)
        budgets = self.needed(num_tokens, longest_append, int(self._table.borders[row]))
        length = int(self._table.lengths[row])
        owned = [
            group.plan_ownership(row, length, reserved, budget)
            for group, budget in zip(self._groups, budgets, strict=True)
        ]
        self._own(row, owned)
        self._table.reserved_ends[row] = reserved
        for group, budget in zip(self._groups, budgets, strict=True):
            group.table.budgets[row] = budget

    def cut(self, row: int, length: int) -> None:
        """Shortens a row to `length`; what it has reserved stays, and becomes its own. OutOfPages changes nothing."""
        self.check_held("the sequence", row, length)
        reserved, used = int(self._table.reserved_ends[row]), -(-length // self._page_size)
        # It takes no page for those that the prefix index shares by now: these come back when they leave the window.
        owned = [group.plan_ownership(row, length, min(reserved, int(group.table.ends[row]))) for group in self._groups]
        self._own(row, owned)
        ends = [max(used, change.end) for change in owned]
        self._pools.release(tuple(group.cut(row, end) for group, end in zip(self._groups, ends, strict=True)))
        self._table.lengths[row] = length
        self._table.count_cut(row)

    def cut_reserved(self, rows: Int64Array, counts: Int64Array) -> bool:
        """cut() by counts[i] positions of each of distinct rows, int64 [B] both, that hold what they have reserved and
        share no page from there on; False, and nothing changes, where one of them is not so."""
        table, size, held = self._table, self._page_size, self._table.lengths[rows]
        lengths = held - counts
        if self._dropping or rows.size == 0 or counts.min() < 0 or lengths.min() < 0:
            return False
        tails = lengths // size
        spans = -(-held // size) - tails
        if not all(group.owns(rows, tails, spans, table.reserved_ends[rows]) for group in self._groups):
            return False
        table.lengths[rows] = lengths
        table.cuts[rows] += 1
        table.num_cuts += rows.size
        return True

    def fork(self, parent: int, child: int, length: int) -> None:
        """Gives the empty row `child` the first `length` positions of row `parent`; OutOfPages changes nothing."""
        if length:
            self.check_held("the fork", parent, length)
        copied = 1 if length % self._page_size else 0  # by groups that grow
        copies = [0 if group.keeps.given else copied for group in self._groups]
        shared = tuple(group.shared_by_fork(parent, length) for group in self._groups)
        self._pools.retain(shared)
        reserved = int(self._table.reserved_ends[parent])
        owned = [group.plan_ownership(parent, int(self._table.lengths[parent]), reserved) for group in self._groups]
        try:
            counts = zip(copies, owned, strict=True)
            pages = self._pools.allocate([count + change.num_pages for count, change in counts])
        except OutOfPages:
            self._pools.release(shared)
            raise
        for group, count, change, ids in zip(self._groups, copies, owned, pages, strict=True):
            group.fork(parent, child, length, ids[:count])
            group.own(parent, change, ids[count:])
        self._table.lengths[child] = length
        self._table.unclean[child] = self._table.unclean[parent]

    def share(self, row: int, num_pages: int, pages: PageIds) -> None:
        """Gives an empty row num_pages full pages: per group the last of them, which others hold."""
        if not num_pages:
            return
        self._pools.retain(pages)
        for group, ids in zip(self._groups, pages, strict=True):
            group.share(row, num_pages, ids)
        self._table.lengths[row] = num_pages * self._page_size

    def _own(self, row: int, owned: Sequence[Ownership]) -> None:
        pages = self._pools.allocate([change.num_pages for change in owned])
        for group, change, ids in zip(self._groups, owned, pages, strict=True):
            group.own(row, change, ids)
