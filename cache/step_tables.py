"""The page tables of one layer group's forwards: while the same sequences step, each is made of the one before."""

import numpy as np

from tandem.cache.group_table import GroupTable
from tandem.cache.plan import PageTables, TokenLayout, look_up_pages
from tandem.cache.ragged import indptr_of, insert, ragged_range
from tandem.cache.shared_prefixes import SharedPrefixes
from tandem.cache.window import Int64Array


class StepTables:
    """Looks up rows of `table`. The last result is kept: the step after it puts each token one slot on, or into the
    page that its row begins then, which comes behind the row's others; with a window the first of those may leave."""

    def __init__(self, table: GroupTable, window: int | None, page_size: int) -> None:
        self._table = table
        self._window = window
        self._page_size = page_size
        self._kept: tuple[TokenLayout, PageTables, Int64Array | None] | None = None

    def look_up(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None = None) -> PageTables:
        """As look_up_pages of rows (int64 [B]), those of the sequences that have grown by `tokens`."""
        begins = None if self._window is None else self._table.begins[rows]
        if self._kept is not None and tokens.follows(self._kept[0]):
            tables = self._step(*self._kept[1:], rows, tokens, begins, shared)
        else:
            tables = look_up_pages(self._table.pages, rows, tokens, self._page_size, begins, shared)
        self._kept = tokens, tables, begins
        return tables

    def _step(
        self,
        before: PageTables,
        begins_before: Int64Array | None,
        rows: Int64Array,
        tokens: TokenLayout,
        begins: Int64Array | None,
        shared: SharedPrefixes | None,
    ) -> PageTables:
        slots, kv_indptr, kv_indices = before.slot_mapping + 1, before.kv_indptr, before.kv_indices
        last_page_len, kv_lens = before.kv_last_page_len + 1, tokens.seq_lens
        if begins is not None and begins_before is not None:
            kv_lens = before.kv_lens + 1
            left = begins - begins_before
            losing = left.nonzero()[0]
            if losing.size:
                kv_lens -= (left * self._page_size).astype(np.int32)
                kv_indices = np.delete(kv_indices, ragged_range(kv_indptr[losing], left[losing]))
                kv_indptr = kv_indptr - indptr_of(left)
        beginning = last_page_len > self._page_size
        begun = beginning.nonzero()[0]
        if begun.size:
            pages = self._table.pages[rows[begun], tokens.positions[begun] // self._page_size]
            slots[begun], last_page_len[begun] = pages * self._page_size, 1
            kv_indices = insert(kv_indices, kv_indptr[begun + 1], pages)
            kv_indptr = kv_indptr + indptr_of(beginning)
        return PageTables(slots, kv_indptr, kv_indices, last_page_len, kv_lens, shared)
