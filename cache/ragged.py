"""Pieces of unlike lengths, one after another: CSR arrays as FlashInfer takes them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.cache.position_map import Int32Array
from tandem.cache.window import Int64Array

IntArray = NDArray[np.signedinteger[Any]]


def indptr_of(counts: IntArray | NDArray[np.bool_]) -> Int32Array:
    """int32 [n + 1]: where each of n pieces begins, and where the last one ends."""
    indptr = np.zeros(counts.size + 1, np.int32)
    np.add.accumulate(counts, out=indptr[1:])
    return indptr


def ragged_range(begins: IntArray | int, counts: IntArray) -> Int64Array:
    """int64: begins[i], begins[i] + 1, … (counts[i] of them), one after another."""
    ends = np.add.accumulate(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + (begins + counts - ends).repeat(counts)


def ragged_pairs(rows: Int64Array, begins: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """rows[i] with each of begins[i], begins[i] + 1, … (counts[i] of them), one row after another; at least one row."""
    if int(counts.max()) <= 1:  # as when each row grows by one position
        some = counts.nonzero()[0]
        return rows[some], begins[some]
    return rows.repeat(counts), ragged_range(begins, counts)


def ragged_rows(
    pages: Int32Array, rows: Int64Array, indptr: Int32Array, first_columns: Int64Array | None = None
) -> Int32Array:
    """Entries of rows[i] from column first_columns[i] (None: 0) on, indptr[i + 1] - indptr[i] of them, one row after
    another."""
    starts = indptr[:-1]
    counts = indptr[1:] - starts
    widest = int(counts.max())
    if first_columns is None and widest * rows.size == int(indptr[-1]):  # all are as wide
        return pages[:, :widest][rows].reshape(-1)
    begins = rows * pages.shape[1] - starts
    places = (begins if first_columns is None else begins + first_columns).repeat(counts)
    places += np.arange(places.size)
    return pages.reshape(-1).take(places)
