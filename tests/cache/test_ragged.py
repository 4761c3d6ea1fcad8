"""Arrays of pieces of unlike lengths, against loops."""

import numpy as np

from tandem.cache.ragged import indptr_of, ragged_range, slots_of_pages


def test_pieces_one_after_another() -> None:
    begins, counts = np.array([5, 0, 7], np.int32), np.array([2, 0, 3], np.int32)
    assert ragged_range(begins, counts).tolist() == [5, 6, 7, 8, 9]
    assert indptr_of(counts).tolist() == [0, 2, 2, 5]
    assert ragged_range(begins[:0], counts[:0]).size == 0


def test_slots_of_all_positions() -> None:
    """Sequences of 5, 8 and 1 positions on pages of 4."""
    pages = np.array([7, 2, 0, 9, 3], np.int32)
    slots = slots_of_pages(pages, np.array([2, 2, 1], np.int32), np.array([5, 8, 1], np.int32), page_size=4)
    assert slots.dtype == np.int32
    assert slots.tolist() == [28, 29, 30, 31, 8, 0, 1, 2, 3, 36, 37, 38, 39, 12]
