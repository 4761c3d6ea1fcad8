"""Pieces of unlike lengths, one after another: CSR arrays as FlashInfer takes them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.cache.position_map import Int32Array
from tandem.cache.window import Int64Array

IntArray = NDArray[np.signedinteger[Any]]


def indptr_of(counts: IntArray) -> Int32Array:
    """int32 [n + 1]: where each of n pieces begins, and where the last one ends."""
    indptr = np.zeros(counts.size + 1, np.int32)
    np.add.accumulate(counts, out=indptr[1:])
    return indptr


def ragged_range(begins: IntArray | int, counts: IntArray) -> Int64Array:
    """int64: begins[i], begins[i] + 1, … (counts[i] of them), one after another."""
    ends = np.add.accumulate(counts)
    total = int(ends[-1]) if ends.size else 0
    return np.arange(total) + (begins + counts - ends).repeat(counts)


def ragged_rows(
    pages: Int32Array, rows: Int64Array, indptr: Int32Array, first_columns: Int64Array | None = None
) -> Int32Array:
    """Entries of rows[i] from column first_columns[i] (None: 0) on, indptr[i + 1] - indptr[i] of them, one row after
    another."""
    total, starts = int(indptr[-1]), indptr[:-1]
    counts = indptr[1:] - starts
    widest = int(counts.max())
    begins = None if first_columns is None else rows * pages.shape[1] + first_columns
    if widest * rows.size > 2 * total:
        begins = rows * pages.shape[1] if begins is None else begins
        return pages.reshape(-1).take(np.arange(total) + (begins - starts).repeat(counts))
    # Copy as much of each row, then drop what is too much (it may lie behind the table): fastest when counts are alike.
    places = np.arange(widest, dtype=np.int32)
    if begins is None:
        square = pages[:, :widest][rows]
    else:
        square = pages.reshape(-1).take(begins[:, None] + places, mode="clip")
    return square.reshape(-1) if widest * rows.size == total else square[places < counts[:, None]]
