"""Projection against F.linear, for row counts on both sides of its padding."""

import pytest
import torch
import torch.nn.functional as F

from tandem.workers.models.projection import Projection, padded_rows


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 9, 63, 65, 100, 257, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_linear(rows: int, dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(24, 16, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype) if biased else None
    x = torch.randn(rows, 32, generator=generator).to(dtype)[:, :16]
    with torch.inference_mode():
        y = Projection(weight, bias)(x)
    assert y.shape == (rows, 24)
    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_few_numbers_of_rows() -> None:
    padded = [padded_rows(rows) for rows in range(1025)]
    assert all(rows <= more <= max(8, 1.8 * rows) for rows, more in enumerate(padded[2:], start=2))
    assert len(set(padded)) < 24
