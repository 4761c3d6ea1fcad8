"""The pages that the sequences of a cache hold, in all its layer groups at once."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tandem.cache.kernels.base import PageOperations
from tandem.cache.pages.fenced_pages import FencedPages
from tandem.cache.pages.group_pages import GroupPages, Ownership, lay_out_appends
from tandem.cache.pages.page_pools import PageIds, PagePools
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.pages.state_snapshots import StateSnapshots
from tandem.cache.pages.step_growth import StepChange, StepGrowth
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.pool_sizes import NO_SNAPSHOTS, SnapshotRule
from tandem.cache.plan.spans import Paging
from tandem.cache.plan.tables import NO_WRITES, StateWrites, TokenLayout


class SequencePages:
    """Moves pages between `pools` and the rows of `table`. A call changes every group or, with OutOfPages, none."""

    def __init__(
        self,
        layout: KVLayout,
        table: SequenceTable,
        pools: PagePools,
        memory: Sequence[PageOperations],
        rule: SnapshotRule = NO_SNAPSHOTS,
    ) -> None:
        """memory: what moves the pages of each layer group. rule: when snapshots of states are taken."""
        self._table = table
        self._pools = pools
        self._layout = layout
        self._rule = rule
        self._no_writes = (NO_WRITES,) * len(layout.groups)
        self.snapshots = tuple(
            StateSnapshots(pools, number, layout.page_size, rule) if group.keeps.last else None
            for number, group in enumerate(layout.groups)
        )
        of_groups = zip(layout.groups, table.groups, pools.users, memory, self.snapshots, strict=True)
        self._groups = [
            GroupPages(
                kind.keeps, group, users, FencedPages(mover, pools, number), layout.grain, table.sliding, snapshots
            )
            for number, (kind, group, users, mover, snapshots) in enumerate(of_groups)
        ]
        self._page_size = table.page_size
        self._paging = list(dict.fromkeys(layout.paging))  # groups that are paged alike grow alike
        self._paging_of = [self._paging.index(one) for one in layout.paging]
        self._dropping = [group for group in self._groups if group.keeps.drops_past]
        kinds = zip(self._groups, self._paging_of, strict=True)
        self._numbers = [number for number, group in enumerate(self._groups) if not group.keeps.given]
        self._growing = [(group, of) for group, of in kinds if not group.keeps.given]
        self.encodes = len(self._growing) < len(self._groups)
        """Whether sequences may have an encoder, whose entries a group keeps."""
        growing = [group for group, _ in self._growing]
        self._steps = StepGrowth.load(
            [group.table for group in growing], [group.keeps for group in growing], layout.grain, table.reserved
        )

    def open(self, row: int) -> None:
        """Opens an empty row."""
        for group in self._groups if self._table.borders[row] else ():
            group.open(row)

    def needed(self, num_tokens: int, longest_append: int, border: int = 0) -> tuple[int, ...]:
        """Returns for each group the most pages that a sequence of num_tokens positions, appended in pieces, holds at
        once. border: see SequenceTable."""
        return tuple(group.pages_needed(num_tokens, longest_append, border) for group in self._groups)

    def first_positions(self, row: int) -> list[int]:
        """Returns for each group the first position of a row that no window has dropped."""
        return [group.first_page(row) * group.table.page_size for group in self._groups]

    def check_held(self, what: str, row: int, length: int) -> None:
        """InvalidArgument unless every group holds what a query at position `length` of a row's text sees."""
        border = int(self._table.borders[row])
        if length < border * self._page_size:
            raise InvalidArgument(
                f"{what} would have {length} positions; an encoder's come whole: it must have at least "
                f"{border * self._page_size}"
            )
        held = self._table.num_positions(row)
        for index, group in enumerate(self._groups):
            if group.snapshots is not None and length not in (0, held) and not group.has_state(row, length):
                others = [one for one in group.snapshots.positions(row) if one != held]
                raise InvalidArgument(
                    f"{what} would have {length} positions, but layer group {index} has no state there: it has states "
                    f"after {', '.join(map(str, (0, *others, held)))} positions"
                )
            begin = group.first_page(row)
            if group.first_page_index(length, border) < begin:
                lengths = range(held + 1)
                least = bisect_left(lengths, begin, key=partial(group.first_page_index, border=border))
                raise InvalidArgument(
                    f"{what} would have {length} positions, but those before {begin * self._page_size} have left the "
                    f"window of layer group {index}; it must have at least {least}"
                )

    def check_unsent(self, seq_ids: Sequence[int], rows: Int64Array, appends: Int64Array, marks: SendMarks) -> None:
        """InvalidArgument where growing by `appends` (int64 [B]) would drop positions that a row has yet to send. A
        group with a window keeps only what later queries see, and a group with states only the last position."""
        if marks.count == 0 or not (self._dropping or self._layout.recurs):
            return
        lengths = self._table.lengths[rows] + self._table.sliding.dropped[rows]
        if self._layout.recurs:
            past = (marks.planned[rows] < marks.ends[rows]) & (lengths + appends > marks.ends[rows])
            for index in past.nonzero()[0].tolist():
                raise InvalidArgument(
                    f"sequence {seq_ids[index]} is to send its state behind {marks.ends[rows[index]]} positions, and "
                    f"would grow to {lengths[index] + appends[index]}; send_cached sends it first"
                )
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
        kinds = [lay_out_appends(self._table, one, rows, lengths, new_lengths, queries) for one in self._paging]
        appends = [kinds[of] for of in self._paging_of]
        growths = [group.plan_growth(own) for group, own in zip(self._groups, appends, strict=True)]
        gone = tuple(
            np.concatenate((growth.gone, ids)) if ids.size else growth.gone
            for growth, ids in zip(growths, gone, strict=True)
        )
        pages = self._pools.exchange(gone, [growth.num_pages for growth in growths])
        for group, own, growth, ids in zip(self._groups, appends, growths, pages, strict=True):
            group.grow(own, growth, ids, clear=clear)
        self._table.lengths[rows], self._table.shortened[rows] = new_lengths, False

    def begin_pages(self, lengths: Int64Array) -> NDArray[np.bool_]:
        """bool [B]: which rows of `lengths` (int64 [B]) begin a page of some group with the next position."""
        begins = self._begin_pages_of(self._paging[0], lengths)
        for paging in self._paging[1:]:
            begins |= self._begin_pages_of(paging, lengths)
        return begins

    def clear_next(self, rows: Int64Array, *, clear: bool = True) -> bool:
        """Clears the pages that rows (int64 [B], see begin_pages) begin next, where all are reserved; else False.
        clear: whether they are cleared."""
        begun = [self._next_pages(paging, rows) for paging in self._paging]
        if not all(group.holds(*begun[of]) for group, of in self._growing):
            return False
        for group, of in self._growing if clear else ():
            if begun[of][0].size:
                group.clear(*begun[of])
        return True

    @staticmethod
    def _begin_pages_of(paging: Paging, lengths: Int64Array) -> NDArray[np.bool_]:
        if paging.every == 1:
            return lengths % paging.reach == 0
        return (lengths + 1) % paging.positions == paging.every % paging.positions

    def _gain_pages(self, lengths: Int64Array, new_lengths: Int64Array) -> NDArray[np.bool_]:
        """bool [B]: which rows of `lengths` take a page of some group to grow to new_lengths; int64 [B] both."""
        gain = np.zeros(lengths.shape, np.bool_)
        for paging in self._paging:
            every, size = paging.every, paging.reach
            before, after = (lengths, new_lengths) if every == 1 else (lengths // every, new_lengths // every)
            gain |= (after - 1) // size > (before - 1) // size
        return gain

    def _next_pages(self, paging: Paging, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The rows that begin a page of this paging with the next position, and its page index; int64 [n] each."""
        lengths = self._table.lengths[rows]
        if len(self._paging) > 1:
            begins = self._begin_pages_of(paging, lengths)
            rows, lengths = rows[begins], lengths[begins]
        return rows, lengths // paging.positions

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
        """Does what grow() does, for rows that were not shortened and so own their partial pages. Something changes
        only where a row begins a page, a page leaves a window, or a sequence has slid. slid: bool [B], the sequences
        that have; None: none. each_one: whether each row grows by one position."""
        if slid is None and self._steps is not None:
            changes = self._steps.plan(rows, lengths, new_lengths, queries)
            if changes is not None:
                # What was foreseen is one position each, in pages that stay.
                self._step(changes, clear=clear or not each_one or bool(self._dropping))
                self._table.lengths[rows] = new_lengths
                return
        changing = self.begin_pages(lengths) if each_one else self._gain_pages(lengths, new_lengths)
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

    def _step(self, changes: Sequence[StepChange], *, clear: bool) -> None:
        """Carries out what changes in the groups that grow; OutOfPages changes nothing."""
        if not changes:
            return
        gone, counts = list(self._pools.none), [0] * len(self._groups)
        for number, change in zip(self._numbers, changes, strict=True):
            gone[number], counts[number] = change.gone, change.num_pages
        pages = self._pools.exchange(tuple(gone), counts)
        for number, change in zip(self._numbers, changes, strict=True):
            self._groups[number].step(change, pages[number], clear=clear)

    def reserve(self, row: int, num_tokens: int, longest_append: int) -> None:
        """Makes sure that a row can always grow to num_tokens positions; OutOfPages changes nothing."""
        budgets = self.needed(num_tokens, longest_append, int(self._table.borders[row]))
        length = int(self._table.lengths[row])
        owned = [
            group.plan_ownership(row, length, group.table.paging.num_pages(num_tokens), budget)
            for group, budget in zip(self._groups, budgets, strict=True)
        ]
        self._own(row, owned)
        self._table.reserved[row] = num_tokens
        for group, budget in zip(self._groups, budgets, strict=True):
            group.table.budgets[row] = budget

    def cut(self, row: int, length: int) -> None:
        """Shortens a row to `length`; what it has reserved stays, and becomes its own. OutOfPages changes nothing."""
        self.check_held("the sequence", row, length + int(self._table.sliding.dropped[row]))
        # It takes no page for those that the prefix index shares by now: these come back when they leave the window.
        reserved = [min(end, int(of.table.ends[row])) for of, end in self._reserved_ends(row)]
        owned = [of.plan_ownership(row, length, end) for of, end in zip(self._groups, reserved, strict=True)]
        self._own(row, owned)
        used = [group.table.paging.num_pages(length) for group in self._groups]
        ends = [max(end, change.end) for end, change in zip(used, owned, strict=True)]
        for group in self._groups if length < self._table.lengths[row] else ():
            group.take_back(row, length)
        self._pools.release(tuple(group.cut(row, end) for group, end in zip(self._groups, ends, strict=True)))
        self._table.lengths[row] = length
        self._table.count_cut(row)

    def cut_reserved(self, rows: Int64Array, counts: Int64Array) -> bool:
        """Cuts rows, which are distinct, by counts[i] positions each, int64 [B] both. False, and nothing changes,
        unless all rows hold what they have reserved and share no page from the cut on."""
        table, size, held = self._table, self._page_size, self._table.lengths[rows]
        lengths = held - counts
        if self._dropping or len(self._paging) > 1 or rows.size == 0 or counts.min() < 0:
            return False
        if np.count_nonzero(lengths < table.borders[rows] * size):
            return False
        tails = lengths // size
        spans = -(-held // size) - tails
        reserved = -(-table.reserved[rows] // size)
        if not all(group.owns(rows, tails, spans, reserved) for group, _ in self._growing):
            return False
        table.lengths[rows] = lengths
        table.cuts[rows] += 1
        table.num_cuts += rows.size
        return True

    def fork(self, parent: int, child: int, length: int) -> None:
        """Gives the empty row `child` the first `length` positions of row `parent`; OutOfPages changes nothing."""
        if length:
            self.check_held("the fork", parent, length)
        copies = [group.num_partial(length) for group in self._groups]
        shared = tuple(group.shared_by_fork(parent, length) for group in self._groups)
        self._pools.retain(shared)
        held = int(self._table.lengths[parent])
        owned = [group.plan_ownership(parent, held, end) for group, end in self._reserved_ends(parent)]
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

    def share(self, row: int, length: int, pages: PageIds) -> None:
        """Gives an empty row `length` positions in full pages: for each group the last ones, which others hold. The
        row gets a copy of a snapshot. OutOfPages changes nothing."""
        if not length:
            return
        self._pools.retain(pages)
        try:
            copies = self._pools.allocate([int(group.keeps.last) for group in self._groups])
        except OutOfPages:
            self._pools.release(pages)
            raise
        for group, ids, own in zip(self._groups, pages, copies, strict=True):
            if group.keeps.last:
                group.begin_at(row, length, ids, own)
                group.users.release(ids)
            else:
                group.share(row, length // group.table.paging.positions, ids)
        self._table.lengths[row] = length

    def drop(self, row: int) -> None:
        """Releases what a removed row holds, also its snapshots."""
        self._pools.release(self._table.held_pages(row))
        for snapshots in self.snapshots:
            if snapshots is not None:
                snapshots.drop(row)

    def check_states(self, seq_ids: Sequence[int], rows: Int64Array, appends: Int64Array, *, drafted: bool) -> None:
        """InvalidArgument where rows that would grow by `appends` (int64 [B]) have grown without their states, or more
        have drafts than states can be kept for."""
        for of in self.snapshots:
            behind = of.behind(rows) if of is not None else None
            if behind is not None:
                raise InvalidArgument(
                    f"sequence {seq_ids[behind[0]]} has grown without its states, from {behind[1]} positions on; pop "
                    "takes these back first"
                )
        count = int(np.count_nonzero(appends > 1)) if drafted else 0
        if count > self._rule.drafted:
            raise InvalidArgument(
                f"append_lengths has {count} sequences with drafts; it may have at most {self._rule.drafted}, as many "
                "as there are pages for the states before drafts"
            )

    def keep_states(
        self, rows: Int64Array, tokens: TokenLayout, *, drafted: bool, without: bool
    ) -> tuple[StateWrites, ...]:
        """Returns for each group the snapshots that a forward writes, which has grown rows (int64 [B]) by `tokens`.
        drafted: see Batch. without: the forward leaves the rows' states as they are."""
        if not self._layout.recurs:
            return self._no_writes
        ends = tokens.seq_lens.astype(np.int64)
        lengths = ends - np.diff(tokens.qo_indptr)
        if without:
            for of in self.snapshots:
                if of is not None:
                    of.fall_behind(rows, lengths)
            return self._no_writes
        for group in self._groups if drafted else ():
            if group.snapshots is not None:
                group.keep_before(rows, lengths, ends - lengths)
        return tuple(
            NO_WRITES if of is None else of.keep(rows, lengths, ends, drafted=drafted) for of in self.snapshots
        )

    def publish(self, row: int, token_ids: Int64Array, salt: bytes) -> None:
        """The prefix index gets the full pages of a row's first positions, of groups with states its snapshots. Where
        none are taken, nobody could go on after the pages, and it gets nothing."""
        if self._layout.recurs and not self._rule.most:
            return
        size, num_pages = token_ids.size, token_ids.size // self._page_size
        pages = tuple(
            full if of is None else of.to_publish(row, num_pages)
            for full, of in zip(self._table.full_pages(row, size), self.snapshots, strict=True)
        )
        self._pools.prefixes.publish(token_ids, pages, salt, int(self._table.borders[row]))
        for of in self.snapshots:
            if of is not None:
                of.published(row, num_pages)

    def _reserved_ends(self, row: int) -> list[tuple[GroupPages, int]]:
        """Each group, and the page index that a row's reservation reaches to."""
        reserved = int(self._table.reserved[row])
        return [(group, group.table.paging.num_pages(reserved)) for group in self._groups]

    def _own(self, row: int, owned: Sequence[Ownership]) -> None:
        pages = self._pools.allocate([change.num_pages for change in owned])
        for group, change, ids in zip(self._groups, owned, pages, strict=True):
            group.own(row, change, ids)
