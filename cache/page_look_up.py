"""The page tables of one layer group's forwards: page_tables.c looks them up where it can be built, else numpy."""

import ctypes
from pathlib import Path

import numpy as np

from tandem.cache.group_table import GroupTable
from tandem.cache.kernels.native_build import load_library
from tandem.cache.plan import PageTables, TokenLayout, look_up_pages, slots_in
from tandem.cache.position_map import Int32Array
from tandem.cache.ragged import indptr_of
from tandem.cache.shared_prefixes import SharedPrefixes
from tandem.cache.stream_table import StreamTable
from tandem.cache.window import Int64Array

SOURCE = Path(__file__).parent / "kernels" / "page_tables.c"
POINTER, INT32, INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Table(ctypes.Structure):
    """Table of page_tables.c."""

    _fields_ = (("pages", POINTER), ("begins", POINTER), ("max_pages", INT64), ("page_size", INT32), ("unused", INT32))


class PageLookUp:
    """Looks up rows of `table`, of a group with this window."""

    def __init__(self, table: GroupTable, window: int | None, page_size: int) -> None:
        self._table = table
        self._window = window
        self._page_size = page_size
        library = load_library(SOURCE)
        if library is None:
            self._native = None
            return
        native_table = _Table(_address(table.pages), _address(table.begins), table.pages.shape[1], page_size)
        self._native_table, self._native_address = native_table, ctypes.addressof(native_table)
        self._native = library.look_up
        self._native.argtypes = (POINTER, INT32, *(POINTER,) * 9, INT64)
        self._native.restype = INT64
        self._native_slots = library.stream_slots
        self._native_slots.argtypes = (POINTER, INT32, *(POINTER,) * 5)
        self._native_slots.restype = None
        self._num_pages = 0  # of the last look-up

    def look_up(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None = None) -> PageTables:
        """As look_up_pages of rows (int64 [B], B ≥ 1), those of the sequences that have grown by `tokens`."""
        if self._native is not None:
            return self._look_up_natively(rows, tokens, shared)
        begins = None if self._window is None else self._table.begins[rows]
        return look_up_pages(self._table.pages, rows, tokens, self._page_size, begins, shared)

    def stream_slots(
        self, rows: Int64Array, lengths: Int64Array, streams: StreamTable
    ) -> tuple[Int32Array, Int32Array]:
        """bounds int32 [N + 1] and slots int32: slots[bounds[i] : bounds[i + 1]] are those of all that rows[i] (int64
        [N], of `streams`) stores, in order; at least one. lengths: int64 [max_sequences]."""
        bounds = indptr_of(lengths[rows] - streams.holes[rows])
        if self._native is None:
            indices = streams.in_use(rows, lengths[rows])
            return bounds, slots_in(self._table.pages, rows.repeat(np.diff(bounds)), indices, self._page_size)
        slots = np.empty(int(bounds[-1]), np.int32)
        arrays = rows, lengths, streams.sinks, streams.holes, slots
        self._native_slots(self._native_address, rows.size, *map(_address, arrays))
        return bounds, slots

    def _look_up_natively(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None) -> PageTables:
        num_tokens, count = tokens.positions.size, rows.size
        bounds = num_tokens, num_tokens + count + 1, num_tokens + 2 * count + 1
        arrays = np.empty(num_tokens + 3 * count + 1, np.int32)
        slots = _address(arrays)
        arguments = (
            *(self._native_address, count, _address(rows)),
            *map(_address, (tokens.qo_indptr, tokens.positions, tokens.seq_lens)),
            *(slots, *(slots + 4 * bound for bound in bounds)),
        )
        room = self._num_pages + num_tokens  # enough for a step of the same sequences
        kv_indices = np.empty(room, np.int32)
        num_pages = self._native(*arguments, _address(kv_indices), room)
        if num_pages > room:
            kv_indices = np.empty(num_pages, np.int32)
            self._native(*arguments, _address(kv_indices), num_pages)
        self._num_pages = num_pages
        first, second, third = bounds
        return PageTables(
            arrays[:first], arrays[first:second], kv_indices[:num_pages], arrays[second:third], arrays[third:], shared
        )


def _address(array: Int32Array | Int64Array) -> int:
    """Of a writable array, contiguous and not empty; a third of what array.ctypes takes."""
    return ctypes.addressof(INT32.from_buffer(array.data))
