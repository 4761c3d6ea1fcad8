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
    np.cumsum(counts, out=indptr[1:])
    return indptr


def ragged_range(begins: IntArray, counts: IntArray) -> Int64Array:
    """int64: begins[i], begins[i] + 1, … (counts[i] of them), one after another."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if ends.size else 0) + np.repeat(begins - (ends - counts), counts)
