"""The page tables of one layer group's forwards: page_tables.c looks them up where it can be built, else numpy."""

import ctypes
from pathlib import Path

import numpy as np

from tandem.cache.group_table import GroupTable
from tandem.cache.kernels.native_build import load_library
from tandem.cache.plan import PageTables, TokenLayout, look_up_pages
from tandem.cache.position_map import Int32Array
from tandem.cache.shared_prefixes import SharedPrefixes
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
        self._library = library
        if library is None:
            return
        address, max_pages = _address(table.pages), table.pages.shape[1]
        self._native = _Table(address, _address(table.begins), max_pages, page_size)
        self._native_address = ctypes.addressof(self._native)
        self._lay_out, self._gather = library.lay_out_tables, library.gather_pages
        self._lay_out.argtypes = (POINTER, INT32, *(POINTER,) * 8)
        self._lay_out.restype = INT64
        self._gather.argtypes = (POINTER, INT32, *(POINTER,) * 3)
        self._gather.restype = None

    def look_up(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None = None) -> PageTables:
        """As look_up_pages of rows (int64 [B], B ≥ 1), those of the sequences that have grown by `tokens`."""
        if self._library is not None:
            return self._look_up_natively(rows, tokens, shared)
        begins = None if self._window is None else self._table.begins[rows]
        return look_up_pages(self._table.pages, rows, tokens, self._page_size, begins, shared)

    def _look_up_natively(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None) -> PageTables:
        num_tokens, count = tokens.positions.size, rows.size
        bounds = num_tokens, num_tokens + count + 1, num_tokens + 2 * count + 1
        arrays = np.empty(num_tokens + 3 * count + 1, np.int32)
        slots, of_rows = _address(arrays), _address(rows)
        indptr, last_page_lens, kv_lens = (slots + 4 * bound for bound in bounds)
        num_pages = self._lay_out(
            self._native_address,
            count,
            of_rows,
            *map(_address, (tokens.qo_indptr, tokens.positions, tokens.seq_lens)),
            slots,
            indptr,
            last_page_lens,
            kv_lens,
        )
        kv_indices = np.empty(num_pages, np.int32)
        self._gather(self._native_address, count, of_rows, indptr, _address(kv_indices))
        first, second, third = bounds
        return PageTables(
            arrays[:first], arrays[first:second], kv_indices, arrays[second:third], arrays[third:], shared
        )


def _address(array: Int32Array | Int64Array) -> int:
    """Of a writable array, contiguous and not empty; a third of what array.ctypes takes."""
    return ctypes.addressof(INT32.from_buffer(array.data))
