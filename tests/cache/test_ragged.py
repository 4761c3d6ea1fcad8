"""Arrays of pieces of unlike lengths, against loops."""

import numpy as np

from tandem.cache.ragged import indptr_of, ragged_range


def test_pieces_one_after_another() -> None:
    begins, counts = np.array([5, 0, 7], np.int32), np.array([2, 0, 3], np.int32)
    assert ragged_range(begins, counts).tolist() == [5, 6, 7, 8, 9]
    assert indptr_of(counts).tolist() == [0, 2, 2, 5]
    assert ragged_range(begins[:0], counts[:0]).size == 0
