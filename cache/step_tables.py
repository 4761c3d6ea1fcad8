"""The page tables of one layer group's forwards: while the same sequences step, each is made of the one before."""

from tandem.cache.group_table import GroupTable
from tandem.cache.plan import PageTables, TokenLayout, look_up_pages
from tandem.cache.ragged import indptr_of, insert
from tandem.cache.shared_prefixes import SharedPrefixes
from tandem.cache.window import Int64Array


class StepTables:
    """Looks up rows of `table`. The last result is kept: the step after it puts each token one slot on, or into the
    page that its row begins then, which comes behind the row's others."""

    def __init__(self, table: GroupTable, window: int | None, page_size: int) -> None:
        self._table = table
        self._window = window
        self._page_size = page_size
        self._kept: tuple[TokenLayout, PageTables] | None = None

    def look_up(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None = None) -> PageTables:
        """As look_up_pages of rows (int64 [B]), those of the sequences that have grown by `tokens`."""
        if self._kept is not None and tokens.follows(self._kept[0]):
            tables = self._step(self._kept[1], rows, tokens, shared)
        else:
            begins = None if self._window is None else self._table.begins[rows]
            tables = look_up_pages(self._table.pages, rows, tokens, self._page_size, begins, shared)
        self._kept = tokens, tables
        return tables

    def _step(
        self, before: PageTables, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None
    ) -> PageTables:
        slots, kv_indptr, kv_indices = before.slot_mapping + 1, before.kv_indptr, before.kv_indices
        last_page_len = before.kv_last_page_len + 1
        beginning = last_page_len > self._page_size
        begun = beginning.nonzero()[0]
        if begun.size:
            pages = self._table.pages[rows[begun], tokens.positions[begun] // self._page_size]
            slots[begun], last_page_len[begun] = pages * self._page_size, 1
            kv_indices = insert(kv_indices, kv_indptr[begun + 1], pages)
            kv_indptr = kv_indptr + indptr_of(beginning)
        return PageTables(slots, kv_indptr, kv_indices, last_page_len, tokens.seq_lens, shared)
