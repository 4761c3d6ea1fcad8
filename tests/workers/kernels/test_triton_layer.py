"""Layer kernels and the one-row product in Triton against torch: on a GPU, else in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.base import Linear, RmsNorm
from tandem.workers.kernels.torch.layer import TorchLayerKernels
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.workers.kernels.triton.gemv import TritonGemv
from tandem.workers.kernels.triton.layer import TritonLayerKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REFERENCE, TRITON, ROW = TorchLayerKernels(), TritonLayerKernels(), TritonGemv()


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_one_rounding(actual: Tensor, expected: Tensor) -> None:
    """Equal but where another order of a sum moves a value across a rounding border, at most twice in a row."""
    if actual.dtype == torch.bfloat16 and DEVICE == "cpu":
        assert_close(actual, expected)  # the interpreter cuts off where a GPU rounds
        return
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * step, atol=4 * step)
    assert actual.dtype == torch.float32 or float((actual != expected).float().mean()) < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 200, 1024])
def test_add_rms_norm(dtype: torch.dtype, hidden: int) -> None:
    x, delta = draw(3, hidden, dtype=dtype), draw(3, hidden, dtype=dtype, seed=1)
    weight, expected_x = draw(hidden, dtype=dtype, seed=2), x.clone()
    expected = REFERENCE.add_rms_norm(expected_x, delta, weight, 1e-6)
    assert_one_rounding(TRITON.add_rms_norm(x, delta, weight, 1e-6), expected)
    assert_one_rounding(x, expected_x)
    kept = x.clone()
    assert_one_rounding(TRITON.add_rms_norm(x, None, weight, 0.1), REFERENCE.add_rms_norm(x, None, weight, 0.1))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_sum_in_parts_is_rounded_once(dtype: torch.dtype, parts: int) -> None:
    x, weight = draw(5, 200, dtype=dtype), draw(200, dtype=dtype, seed=2)
    delta, expected_x = draw(parts, 5, 200, dtype=torch.float32, seed=1), x.clone()
    expected = REFERENCE.add_rms_norm(expected_x, delta, weight, 1e-6)
    assert_one_rounding(TRITON.add_rms_norm(x, delta, weight, 1e-6), expected)
    assert_one_rounding(x, expected_x)
    whole = draw(5, 200, dtype=dtype)
    REFERENCE.add_rms_norm(whole, delta.sum(0).to(dtype), weight, 1e-6)
    assert torch.equal(whole, expected_x)


def test_a_float32_weight_is_multiplied_before_rounding() -> None:
    x, weight = draw(3, 200, dtype=torch.float16), draw(200, dtype=torch.float32, seed=2)
    assert_one_rounding(TRITON.add_rms_norm(x, None, weight, 1e-6), REFERENCE.add_rms_norm(x, None, weight, 1e-6))
    heads, weight = draw(3, 4, 24, dtype=torch.float16), draw(4, 24, dtype=torch.float32, seed=2)
    assert_one_rounding(TRITON.norm_heads(heads, weight, 1e-6), REFERENCE.norm_heads(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(40, 16), (6, 24), (3, 128)])
def test_norm_heads(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """The first heads of a fused projection: tokens lie apart."""
    rows = draw(4, heads + 2, head_dim, dtype=dtype)[:, :heads]
    weight = draw(heads, head_dim, dtype=dtype, seed=1)
    actual = TRITON.norm_heads(rows, weight, 1e-6)
    assert actual.is_contiguous()
    assert_one_rounding(actual, REFERENCE.norm_heads(rows, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [96, 1024, 1500])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = draw(3, 2 * width, dtype=dtype) * 4
    assert_one_rounding(TRITON.silu_mul(gate_up), REFERENCE.silu_mul(gate_up.clone()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [40, 1500])
def test_clamped_swiglu(dtype: torch.dtype, width: int) -> None:
    """The limit is no number of 16 bits, and cuts off many."""
    gate_up, options = 2 * draw(3, 2 * width, dtype=dtype), {"alpha": 1.702, "limit": 2.3}
    before = gate_up.clone()
    assert_one_rounding(TRITON.clamped_swiglu(gate_up, **options), REFERENCE.clamped_swiglu(gate_up, **options))
    assert torch.equal(gate_up, before)


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, norm: RmsNorm | None) -> Tensor:
    row = x.double()
    if norm is not None:
        row = row / (row.square().mean() + norm.eps).sqrt() * norm.weight.double()
    return row @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(14, 64), (64, 200), (12, 4096), (6, 9000)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_one_row(dtype: torch.dtype, rows: int, columns: int, biased: bool) -> None:
    weight, x = draw(rows, columns, dtype=dtype) / columns**0.5, draw(1, columns, dtype=dtype, seed=1)
    bias = draw(rows, dtype=dtype, seed=2) if biased else None
    norm = RmsNorm(draw(columns, dtype=dtype, seed=3), 0.1)
    weights = Linear(weight, bias)
    actual = ROW.linear(x, weights)
    assert actual.dtype == dtype
    assert_close(actual, exact_product(x, weight, bias, None))
    assert_close(ROW.linear(x, weights, norm), exact_product(x, weight, bias, norm))
    total = draw(1, rows, dtype=dtype, seed=4)
    before = total.double()
    ROW.add_linear(total, x, weights)
    assert_close(total, before + exact_product(x, weight, bias, None))
    gate, up = exact_product(x, weight, bias, norm).chunk(2, -1)
    assert_close(ROW.linear_silu_mul(x, weights, norm), gate / (1 + torch.exp(-gate)) * up)
