"""Sequences that grow: what a forward is about to append is checked, gets its pages, and is laid out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.cache.errors import InvalidArgument
from tandem.cache.layout import KVLayout
from tandem.cache.plan import Int64Array, PageTables, TokenLayout, lay_out_tokens, look_up_pages
from tandem.cache.receptions import Receptions
from tandem.cache.sequence_pages import SequencePages
from tandem.cache.sequence_table import SequenceTable


@dataclass(frozen=True, eq=False)
class Grown:
    """rows: int64 [B], of the sequence table. tables: one for each layer group."""

    rows: Int64Array
    tokens: TokenLayout
    tables: list[PageTables]


class Growth:
    """Owned by a PagedKVCache, whose parts it works on."""

    def __init__(
        self, layout: KVLayout, table: SequenceTable, pages: SequencePages, receptions: Receptions, max_length: int
    ) -> None:
        self._layout = layout
        self._table = table
        self._pages = pages
        self._receptions = receptions
        self._max_length = max_length

    def grow(self, seq_ids: Sequence[int] | Int64Array, appends: Int64Array, *, in_flight: int = 0) -> Grown:
        """Appends appends[i] ≥ 1 positions to sequence seq_ids[i]; see PagedKVCache.begin_forward.

        in_flight: positions of each that a forward still running computes; pages that it sees are not taken away yet.
        """
        table = self._table
        rows = table.rows(seq_ids)
        lengths = table.lengths[rows]
        self._check_appends(seq_ids, rows, lengths, appends)
        self._pages.grow(rows, lengths, lengths + appends, queries=np.maximum(lengths - in_flight, 0))
        tokens = lay_out_tokens(lengths, appends)
        tables = [
            look_up_pages(
                group.pages,
                rows,
                tokens,
                self._layout.page_size,
                None if kind.window is None else group.begins[rows],
            )
            for group, kind in zip(table.groups, self._layout.groups, strict=True)
        ]
        return Grown(rows, tokens, tables)

    def check_length(self, sequence: int, length: int) -> None:
        if not 0 <= length <= self._max_length:
            raise InvalidArgument(f"sequence {sequence} would have {length} positions; 0 … {self._max_length} fit")

    def _check_appends(
        self, seq_ids: Sequence[int] | Int64Array, rows: Int64Array, lengths: Int64Array, appends: Int64Array
    ) -> None:
        if rows.size == 0 or appends.shape != rows.shape:
            raise InvalidArgument(f"append_lengths has shape {appends.shape}; it must be [B], B = {rows.size} ≥ 1")
        if int(appends.min()) < 1:
            raise InvalidArgument(f"append_lengths has {int(appends.min())}; lengths must be at least 1")
        longest = int((lengths + appends).argmax())
        self.check_length(int(seq_ids[longest]), int(lengths[longest] + appends[longest]))
        if len(self._receptions) and self._table.receiving[rows].any():
            self._receptions.check_settled(int(seq_ids[int(np.argmax(self._table.receiving[rows]))]))
