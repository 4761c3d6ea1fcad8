"""Sequences that grow: what a forward is about to append is checked, gets its pages, and is laid out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tandem.cache.attention.forward import Parents
from tandem.cache.attention.sliding_sequences import SlidingSequences
from tandem.cache.operations.open_trees import OpenTrees
from tandem.cache.operations.receptions import Receptions
from tandem.cache.pages.page_pools import PageIds
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_pages import SequencePages
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.tables import TokenLayout, lay_out_tokens


@dataclass(frozen=True, eq=False)
class Foreseen:
    """The pages that the next step of `rows`, `lengths` long (int64 [B] each), begins are cleared, unless positions
    were taken back since: num_cuts is SequenceTable's when they were."""

    rows: Int64Array
    lengths: Int64Array
    num_cuts: int


@dataclass(eq=False)
class Growth:
    """Owned by a PagedKVCache, whose parts it works on."""

    table: SequenceTable
    pages: SequencePages
    sliding: SlidingSequences
    marks: SendMarks
    receptions: Receptions
    trees: OpenTrees

    def __post_init__(self) -> None:
        self._foreseen: Foreseen | None = None
        self._ones = np.ones(self.table.max_sequences, np.int64)
        self._one_each: TokenLayout | None = None  # the last that was of one plain token a sequence

    def grow(
        self,
        seq_ids: tuple[int, ...],
        appends: Int64Array,
        parents: Sequence[Parents | None] | None = None,
        *,
        in_flight: int = 0,
    ) -> tuple[Int64Array, TokenLayout]:
        """Appends appends[i] ≥ 1 positions to sequence seq_ids[i], see Batch; their rows, int64
        [B], and how the new tokens are packed.

        in_flight: positions of each that a forward still running computes, or that will be popped; pages that they see
        are not taken away yet.
        """
        rows = self.table.rows(seq_ids)
        each_one = self._check_appends(seq_ids, rows, appends)
        if self.pages.encodes:
            self._check_encoded(seq_ids, rows)
        self.sliding.check_unsent(seq_ids, rows, appends, self.marks)
        self.pages.check_unsent(seq_ids, rows, appends, self.marks)
        trees = self.trees.extended(seq_ids, appends, parents)
        steps = not trees and not np.count_nonzero(self.table.shortened[rows])
        held = self.table.lengths[rows]
        cleared = self.is_foreseen(rows)
        with self.sliding.slid(rows, appends, in_flight=in_flight > 0) as gone:
            lengths = self.table.lengths[rows]
            new_lengths = lengths + appends
            longest = int(new_lengths.argmax())
            self.table.check_length(seq_ids[longest], int(new_lengths[longest]))
            self.sliding.check_reach(seq_ids, rows, new_lengths)
            if trees:  # a root, now or after a commit, looks back from the base
                queries = self.trees.bases(seq_ids, lengths)
            else:
                queries = np.maximum(lengths - in_flight, 0) if in_flight else lengths
            if steps:
                slid = lengths != held if self.table.sliding.count else None
                self.pages.step(rows, lengths, new_lengths, queries, gone, slid, each_one=each_one, clear=not cleared)
            else:
                self.pages.grow(rows, lengths, new_lengths, queries, gone)
        self.receptions.clear_ends(rows, lengths)
        tokens = self._lay_out_one_each(lengths) if each_one else lay_out_tokens(lengths, appends)
        if trees:
            tokens = replace(tokens, trees=self.trees.put(trees, seq_ids, tokens.qo_indptr))
        return rows, tokens

    def encode(self, seq_ids: tuple[int, ...]) -> tuple[Int64Array, TokenLayout]:
        """Appends the encoder's positions, padded to whole pages, to empty sequences; as grow()."""
        table = self.table
        rows = table.rows(seq_ids)
        ends, lengths = table.borders[rows] * table.page_size, table.lengths[rows]
        for sequence, end, length in zip(seq_ids, ends.tolist(), lengths.tolist(), strict=True):
            self.receptions.check_settled(sequence)
            if length or not end:
                raise InvalidArgument(
                    f"sequence {sequence} has {length} positions, and an encoder of {end}; it must be empty and have "
                    "an encoder"
                )
        nothing: PageIds = tuple(np.empty(0, np.int32) for _ in table.groups)
        self.pages.grow(rows, lengths, ends, ends, nothing, clear=False)
        return rows, lay_out_tokens(lengths, ends)

    def one_each(self, count: int) -> Int64Array:
        """The append lengths of a step of `count` sequences; to be read only, and known to be ones."""
        return self._ones[:count]

    def foresee(self, seq_ids: tuple[int, ...]) -> TokenLayout | None:
        """Clears what stands after the ends of sequences that are being received: writers write before it. How their
        next step's tokens are packed; None where it may need other pages than those reserved."""
        rows = self.table.rows(seq_ids)
        if rows.size == 0 or not self.table.receiving[rows].all():
            raise InvalidArgument(f"seq_ids is {list(seq_ids)}; all have to be received now")
        lengths = self.table.lengths[rows]
        self.receptions.clear_ends(rows, lengths)
        if not self.pages.clear_next(rows[self.pages.begin_pages(lengths)]):
            return None
        self._foreseen = Foreseen(rows, lengths, self.table.num_cuts)
        return lay_out_tokens(lengths, np.ones_like(lengths))

    def is_foreseen(self, rows: Int64Array) -> bool:
        """Whether the next step of rows (int64 [B]), which are received by now, is the one foreseen last."""
        last, table = self._foreseen, self.table
        return (
            last is not None
            and rows is last.rows  # see SequenceTable.rows
            and table.num_cuts == last.num_cuts
            and not np.count_nonzero(table.lengths[rows] != last.lengths)
            and not table.receiving[rows].any()
        )

    def _lay_out_one_each(self, lengths: Int64Array) -> TokenLayout:
        """Lays out one token for each sequence, as lay_out_tokens does."""
        last = self._one_each
        if last is None or last.owners.size != lengths.size:
            self._one_each = lay_out_tokens(lengths, np.ones_like(lengths))
        else:
            positions = lengths.astype(np.int32)
            self._one_each = TokenLayout(last.qo_indptr, positions + np.int32(1), positions, last.owners)
        return self._one_each

    def _check_encoded(self, seq_ids: tuple[int, ...], rows: Int64Array) -> None:
        table = self.table
        missing = (table.lengths[rows] < table.borders[rows] * table.page_size).nonzero()[0]
        if missing.size:
            raise InvalidArgument(f"sequence {seq_ids[missing[0]]} lacks its encoder's positions; encode() comes first")

    def _check_appends(self, seq_ids: tuple[int, ...], rows: Int64Array, appends: Int64Array) -> bool:
        """Whether each row gets one position."""
        if rows.size == 0 or appends.shape != rows.shape:
            raise InvalidArgument(f"append_lengths has shape {appends.shape}; it must be [B], B = {rows.size} ≥ 1")
        each_one = appends.base is self._ones or not np.count_nonzero(appends != 1)
        for length in () if each_one else (int(appends.min()), int(appends.max())):  # sums of larger ones overflow
            if not 1 <= length <= self.table.max_length:
                raise InvalidArgument(f"append_lengths has {length}; each must be from 1 to {self.table.max_length}")
        if self.receptions.incoming and self.table.receiving[rows].any():
            self.receptions.check_settled(seq_ids[int(self.table.receiving[rows].argmax())])
        return each_one
