"""Sequences that grow: what a forward is about to append is checked, gets its pages, and is laid out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tandem.cache.errors import InvalidArgument
from tandem.cache.open_trees import OpenTrees, Parents
from tandem.cache.plan import Int64Array, TokenLayout, lay_out_tokens
from tandem.cache.receptions import Receptions
from tandem.cache.store import Store


@dataclass(frozen=True, eq=False)
class LastStep:
    """A forward of one token each of `rows`, `lengths` long with it (int64 [B] each). num_changes: SequenceTable's
    behind it. cleared: whether the pages are that the next step begins.

    While no row loses or exchanges a page but by a window or a slide, one that it has begun stays its own: others come
    to share only full ones.
    """

    rows: Int64Array
    lengths: Int64Array
    tokens: TokenLayout
    num_changes: int
    cleared: bool = False

    def is_before(self, rows: Int64Array, lengths: Int64Array, num_changes: int) -> bool:
        """Whether one more token each of rows of `lengths` (int64 [B] each) is the next step of the same sequences."""
        return (
            rows is self.rows  # see SequenceTable.rows
            and num_changes == self.num_changes
            and not np.count_nonzero(lengths != self.lengths)
        )


class Growth:
    """Owned by a PagedKVCache, whose parts it works on."""

    def __init__(self, store: Store, receptions: Receptions, trees: OpenTrees) -> None:
        self._table, self._pages, self._streams, self._marks = store.table, store.pages, store.streams, store.marks
        self._max_length = store.max_length
        self._receptions = receptions
        self._trees = trees
        self._last_step: LastStep | None = None

    def grow(
        self,
        seq_ids: tuple[int, ...],
        appends: Int64Array,
        parents: Sequence[Parents | None] | None = None,
        *,
        in_flight: int = 0,
    ) -> tuple[Int64Array, TokenLayout]:
        """Appends appends[i] ≥ 1 positions to sequence seq_ids[i], see PagedKVCache.begin_forward; their rows, int64
        [B], and how the new tokens are packed.

        in_flight: positions of each that a forward still running computes; pages that it sees are not taken away yet.
        """
        rows = self._table.rows(seq_ids)
        each_one = self._check_appends(rows, appends)
        self._streams.check_unsent(seq_ids, rows, appends, self._marks)
        trees = self._trees.extended(seq_ids, appends, parents)
        before = self._last_step if each_one and not trees else None
        held = self._table.lengths[rows]
        steps = before is not None and before.is_before(rows, held, self._table.num_changes)
        with self._streams.slid(rows, appends) as gone:
            lengths = self._table.lengths[rows]
            new_lengths = lengths + appends
            self._check_longest(seq_ids, new_lengths)
            if trees:  # a root, now or after a commit, looks back from the base
                queries = self._trees.bases(seq_ids, lengths)
            else:
                queries = np.maximum(lengths - in_flight, 0) if in_flight else lengths
            if before is not None and steps:
                slid = lengths != held if self._table.streams.count else None
                self._pages.step(rows, lengths, new_lengths, queries, gone, slid, clear=not before.cleared)
                tokens = before.tokens.then_one(lengths)
            else:
                self._pages.grow(rows, lengths, new_lengths, queries, gone)
                self._receptions.clear_ends(rows, lengths)
                tokens = lay_out_tokens(lengths, appends)
        if trees:
            tokens = replace(tokens, trees=self._trees.put(trees, seq_ids, tokens.qo_indptr))
        step = each_one and not trees
        self._last_step = LastStep(rows, new_lengths, tokens, self._table.num_changes) if step else None
        return rows, tokens

    def foresee(self, seq_ids: tuple[int, ...]) -> tuple[Int64Array, TokenLayout]:
        """Makes a last step of the last positions of sequences that are being received, whose partial pages are their
        own, and clears what stands behind them: writers write before it. Their rows, and those positions."""
        rows = self._table.rows(seq_ids)
        if not self._table.receiving[rows].all():
            raise InvalidArgument(f"seq_ids is {list(seq_ids)}; all have to be received now")
        lengths = self._table.lengths[rows]
        self._receptions.clear_ends(rows, lengths)
        cleared = self._pages.clear_next(rows, lengths)
        tokens = lay_out_tokens(lengths - 1, np.ones_like(lengths))
        self._last_step = LastStep(rows, lengths, tokens, self._table.num_changes, cleared)
        return rows, tokens

    def _check_longest(self, seq_ids: tuple[int, ...], new_lengths: Int64Array) -> None:
        longest = int(new_lengths.argmax())
        self.check_length(seq_ids[longest], int(new_lengths[longest]))

    def check_length(self, sequence: int, length: int) -> None:
        if not 0 <= length <= self._max_length:
            raise InvalidArgument(f"sequence {sequence} would have {length} positions; 0 … {self._max_length} fit")

    def _check_appends(self, rows: Int64Array, appends: Int64Array) -> bool:
        """Whether each row gets one position."""
        if rows.size == 0 or appends.shape != rows.shape:
            raise InvalidArgument(f"append_lengths has shape {appends.shape}; it must be [B], B = {rows.size} ≥ 1")
        each_one = not np.count_nonzero(appends != 1)
        for length in () if each_one else (int(appends.min()), int(appends.max())):  # sums of larger ones overflow
            if not 1 <= length <= self._max_length:
                raise InvalidArgument(f"append_lengths has {length}; 1 … {self._max_length} are accepted")
        if len(self._receptions) and self._table.receiving[rows].any():
            self._receptions.check_settled_rows(rows)
        return each_one
