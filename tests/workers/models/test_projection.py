"""Projection against F.linear."""

import pytest
import torch
import torch.nn.functional as F

from tandem.workers.kernels.base import Linear
from tandem.workers.models.projection import Projection


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 8, 13, 97, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 24), (1, 1), (40, 200), (2100, 35)])
def test_equals_linear(rows: int, dtype: torch.dtype, biased: bool, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype) / inputs**0.5
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    x = torch.randn(rows, 2 * inputs, generator=generator).to(dtype)[:, :inputs]
    with torch.inference_mode():
        y = Projection(Linear(weight, bias))(x)
    assert y.shape == (rows, outputs)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=rounding, atol=rounding)


def test_a_row_is_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    projection = Projection(Linear(torch.randn(300, 1500, generator=generator)))
    x = torch.randn(200, 1500, generator=generator)
    together = projection(x)
    for begin, end in ((0, 1), (7, 9), (30, 33), (100, 105), (3, 199)):
        assert torch.equal(projection(x[begin:end]), together[begin:end])


def test_a_cpu_has_no_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(8, 8192, generator=generator), torch.randn(200, 8192, generator=generator)
    projection = Projection(Linear(weight))
    assert torch.equal(projection.in_parts(x), projection(x))


def test_a_row_that_does_not_fit_is_refused() -> None:
    projection = Projection(Linear(torch.zeros(8, 4)))
    for x in (torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="x is"):
            projection(x)
