"""Rows that stand elsewhere than was planned: torch's, and Triton's on a GPU, else in its interpreter."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.choice import choose_row_shift
from tandem.cache.kernels.torch import row_shift as of_torch
from tandem.cache.kernels.triton import row_shift as of_triton

GPU = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 4
BACKENDS = {"torch": (of_torch.shift_rows, "cpu"), "triton": (of_triton.shift_rows, GPU)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_rows", [1, 7, 300])
def test_rows_move_back_and_on(backend: str, num_rows: int) -> None:
    """Twice: each by up to all its positions but one, and then on by some of them, or not at all."""
    shift_rows, device = BACKENDS[backend]
    rng = np.random.default_rng(num_rows)
    lengths = rng.integers(1, 6 * PAGE, num_rows)
    pages = [rng.permutation(1000)[: -(-length // PAGE)] for length in lengths]
    counts = np.array([one.size for one in pages])

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.int32, device=device)

    def slots_at(ends: np.ndarray) -> np.ndarray:
        return np.array(
            [own[(end - 1) // PAGE] * PAGE + (end - 1) % PAGE for own, end in zip(pages, ends, strict=True)]
        )

    still = rng.random(num_rows) < 0.3
    slots = slots_at(lengths)
    slots[still] = -1  # of padding, which stores nothing
    tables = DeviceTables(
        on_device(slots),
        on_device(np.concatenate(([0], counts.cumsum()))),
        on_device(lengths - (counts - 1) * PAGE),
        on_device(np.concatenate(pages)),
    )
    back = np.where(still, 0, rng.integers(0, lengths))
    on = rng.integers(0, back + 1)
    for by, ends in ((back, lengths - back), (-on, lengths - back + on)):
        shift_rows(tables, on_device(by), PAGE)
        assert tables.slots.tolist() == np.where(still, -1, slots_at(ends)).tolist()
        assert tables.kv_last_page_len.tolist() == (ends - (counts - 1) * PAGE).tolist()


def test_kernels_suit_their_device() -> None:
    chosen: Callable[..., None] = choose_row_shift(torch.device("cpu"))
    assert chosen is of_torch.shift_rows
    assert choose_row_shift(torch.device("cuda")) is of_triton.shift_rows
