"""Arrays of a plan: their types, ragged rows in CSR form as FlashInfer takes them, and checks of callers' numbers."""

import ctypes
import reprlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.errors import InvalidArgument

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
IntArray = NDArray[np.signedinteger[Any]]

MOST_INTEGER = np.iinfo(np.int64).max
LEAST_FACTOR, MOST_FACTOR = 2.0**-126, 2.0**126  # normal numbers of float32, whose reciprocals are too


def indptr_of(counts: IntArray | NDArray[np.bool_]) -> Int32Array:
    """int32 [n + 1]: where each of n pieces begins, and where the last one ends."""
    indptr = np.zeros(counts.size + 1, np.int32)
    np.add.accumulate(counts, out=indptr[1:])
    return indptr


def ragged_range(begins: IntArray | int, counts: IntArray) -> Int64Array:
    """Returns int64: counts[i] integers from begins[i] on, for one i after another."""
    ends = np.add.accumulate(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + (begins + counts - ends).repeat(counts)


def ragged_pairs(rows: Int64Array, begins: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Returns pairs of rows[i] and each of the counts[i] integers from begins[i] on, one row after another; at least
    one row."""
    if int(counts.max()) <= 1:  # as when each row grows by one position
        some = counts.nonzero()[0]
        return rows[some], begins[some]
    return rows.repeat(counts), ragged_range(begins, counts)


def ragged_rows(
    pages: Int32Array, rows: Int64Array, indptr: Int32Array, first_columns: Int64Array | None = None
) -> Int32Array:
    """Returns indptr[i + 1] - indptr[i] entries of rows[i], from column first_columns[i] (None: 0) on, one row after
    another."""
    starts = indptr[:-1]
    counts = indptr[1:] - starts
    widest = int(counts.max())
    if first_columns is None and widest * rows.size == int(indptr[-1]):  # all are as wide
        return pages[:, :widest][rows].reshape(-1)
    begins = rows * pages.shape[1] - starts
    entries = (begins if first_columns is None else begins + first_columns).repeat(counts)
    entries += np.arange(entries.size)
    return pages.reshape(-1).take(entries)


def integer(name: str, value: object, least: int | None = None) -> int:
    """value as an int. InvalidArgument, which calls it `name`, unless it is one, of Python's or numpy's, and not below
    `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidArgument(f"{name} is {value!r}; it must be an integer")
    if least is not None and value < least:
        raise InvalidArgument(f"{name} is {value}; it must be at least {least}")
    return int(value)


def integers(name: str, values: Any) -> Int64Array:
    """values, a sequence or an array, as int64 [n]. InvalidArgument, which calls them `name`, unless all are integers
    that fit."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of unlike lengths
        array = np.empty((0, 0))
    too_large = array.dtype == np.uint64 and array.size and int(array.max()) > MOST_INTEGER
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or too_large:
        raise InvalidArgument(f"{name} is {reprlib.repr(values)}; it must be a row of integers of 64 bits")
    return array.astype(np.int64, copy=False)


def checked_reach(num_tokens: int, longest_append: int | None) -> tuple[int, int]:
    """Both as ints ≥ 0, see PagedKVCache.reserve; longest_append None is num_tokens."""
    reach = integer("num_tokens", num_tokens, least=0)
    return reach, reach if longest_append is None else integer("longest_append", longest_append, least=0)


def check_factor(name: str, value: Any) -> None:
    """InvalidArgument, which calls it `name`, unless value is a number from LEAST_FACTOR to MOST_FACTOR."""
    is_number = isinstance(value, int | float | np.floating) and not isinstance(value, bool)
    if not is_number or not LEAST_FACTOR <= value <= MOST_FACTOR:
        raise InvalidArgument(f"{name} is {value!r}; it must be a number from {LEAST_FACTOR:.2g} to {MOST_FACTOR:.2g}")


def address_of(array: Int32Array | Int64Array | NDArray[np.bool_]) -> int:
    """Returns the address of a writable array, contiguous and not empty, in a third of the time that array.ctypes
    takes."""
    return ctypes.addressof(ctypes.c_int8.from_buffer(array.data))
