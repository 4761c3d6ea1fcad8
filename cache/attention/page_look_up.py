"""The page tables of one layer group's forwards: page_tables.c looks them up where it can be built, else numpy."""

import ctypes
from pathlib import Path

import numpy as np

from tandem.cache.kernels.build.native_build import load_short_calls
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.pages.sliding_table import SlidingTable
from tandem.cache.plan.arrays import Int32Array, Int64Array, address_of, indptr_of
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.tables import PageTables, TokenLayout, look_up_pages, slots_of

SOURCE = Path(__file__).parents[1] / "kernels" / "native" / "page_tables.c"
POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Table(ctypes.Structure):
    """Table of page_tables.c."""

    _fields_ = (
        ("pages", POINTER),
        ("begins", POINTER),
        ("max_pages", INT64),
        ("page_size", INT32),
        ("chunk_pages", INT32),
    )


class PageLookUp:
    """Looks up rows of `table`. chunk: see Span.chunk; a row may hold pages before the chunk that it ends in."""

    def __init__(self, table: GroupTable, chunk: int | None = None) -> None:
        self._table = table
        self._chunk_pages = 0 if chunk is None else chunk // table.page_size
        library = load_short_calls(SOURCE)
        self._native = None if library is None else _NativeLookUp(library, table, self._chunk_pages)

    def look_up(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None = None) -> PageTables:
        """Looks up the pages of rows (int64 [B], B ≥ 1), see look_up_pages. `tokens` is what their sequences have grown
        by. In a group with chunks, the tokens of each row are in one chunk, see split_by_chunks."""
        if self._native is not None:
            return self._native.look_up(rows, tokens, shared)
        table, begins = self._table, self._table.begins[rows]
        if self._chunk_pages:
            ends = (tokens.seq_lens.astype(np.int64) - 1) // table.page_size
            begins = ends - ends % self._chunk_pages
        return look_up_pages(table.pages, rows, tokens, table.page_size, begins if begins.any() else None, shared)

    def sliding_slots(
        self, rows: Int64Array, lengths: Int64Array, sliding: SlidingTable
    ) -> tuple[Int32Array, Int32Array]:
        """bounds int32 [N + 1] and slots int32: slots[bounds[i] : bounds[i + 1]] are the slots of all entries of
        rows[i] (int64 [N], of `sliding`), in order; at least one. lengths: int64 [max_sequences]."""
        bounds = indptr_of(lengths[rows] - sliding.holes[rows])
        if self._native is not None:
            return bounds, self._native.sliding_slots(rows, lengths, sliding, int(bounds[-1]))
        indices = sliding.in_use(rows, lengths[rows])
        return bounds, slots_of(self._table.pages, rows.repeat(np.diff(bounds)), indices, self._table.page_size)


class _NativeLookUp:
    """Does what PageLookUp does in C code, which reads the table's pages and begins in place."""

    def __init__(self, library: ctypes.PyDLL, table: GroupTable, chunk_pages: int) -> None:
        width, page_size = table.pages.shape[1], table.page_size
        self._table = _Table(address_of(table.pages), address_of(table.begins), width, page_size, chunk_pages)
        self._address = ctypes.addressof(self._table)
        self._look_up, self._sliding_slots = library.look_up, library.stream_slots
        self._look_up.argtypes = (POINTER, INT32, *(POINTER,) * 3, INT32, POINTER, INT64)
        self._look_up.restype = INT64
        self._sliding_slots.argtypes = (POINTER, INT32, *(POINTER,) * 5)
        self._sliding_slots.restype = None
        self._num_pages = 0  # of the last look-up

    def look_up(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None) -> PageTables:
        num_tokens, count = tokens.positions.size, rows.size
        appended = None if tokens.each_one else address_of(tokens.qo_indptr)
        arguments = self._address, count, address_of(rows), address_of(tokens.seq_lens), appended, num_tokens
        first, second, third = num_tokens, num_tokens + count + 1, num_tokens + 2 * count + 1
        begin = third + count
        room = self._num_pages + num_tokens  # enough for a step of the sequences of the last one
        arrays = np.empty(begin + room, np.int32)
        num_pages = self._look_up(*arguments, address_of(arrays), room)
        if num_pages > room:
            arrays = np.empty(begin + num_pages, np.int32)
            self._look_up(*arguments, address_of(arrays), num_pages)
        self._num_pages = num_pages
        kv_indices = arrays[begin : begin + num_pages]
        return PageTables(
            arrays[:first], arrays[first:second], kv_indices, arrays[second:third], arrays[third:begin], shared
        )

    def sliding_slots(self, rows: Int64Array, lengths: Int64Array, sliding: SlidingTable, count: int) -> Int32Array:
        slots = np.empty(count, np.int32)
        arrays = rows, lengths, sliding.sinks, sliding.holes, slots
        self._sliding_slots(self._address, rows.size, *map(address_of, arrays))
        return slots
