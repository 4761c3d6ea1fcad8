"""Arrays of pieces of unlike lengths, against loops."""

import numpy as np
import pytest

from tandem.cache.plan.arrays import indptr_of, ragged_range, ragged_rows


def test_pieces_one_after_another() -> None:
    begins, counts = np.array([5, 0, 7], np.int32), np.array([2, 0, 3], np.int32)
    assert ragged_range(begins, counts).tolist() == [5, 6, 7, 8, 9]
    assert ragged_range(0, counts).tolist() == [0, 1, 0, 1, 2]
    assert indptr_of(counts).tolist() == [0, 2, 2, 5]
    assert ragged_range(begins[:0], counts[:0]).size == 0


@pytest.mark.parametrize("least", [1, 5, 7])  # of seven: very unlike, alike, equal
@pytest.mark.parametrize("shifted", [False, True])
def test_pieces_of_rows(least: int, shifted: bool) -> None:
    random = np.random.default_rng(least)
    pages = random.permutation(12 * 10).reshape(12, 10).astype(np.int32)
    for size in range(1, 12):
        rows = random.permutation(12)[:size]
        counts = np.append(random.integers(least, 8, size - 1), 7)
        columns = random.integers(0, 11 - counts) if shifted else None
        begins = [0] * size if columns is None else columns.tolist()
        expected = [pages[row, first : first + count] for row, first, count in zip(rows, begins, counts, strict=True)]
        assert np.array_equal(ragged_rows(pages, rows, indptr_of(counts), columns), np.concatenate(expected))
