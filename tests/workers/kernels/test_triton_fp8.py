"""Products with weights in 8 bits by Triton's kernels, in its interpreter, against dequantized weights.

Activations are in float16: the interpreter multiplies no bfloat16.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from tandem.workers.kernels.base import RmsNorm, ScaledLinear
from tandem.workers.kernels.expert_blocks import expert_blocks
from tandem.workers.kernels.torch.layer import grouped_linear as reference
from tandem.workers.kernels.triton import grouped
from tandem.workers.kernels.triton.fp8 import Fp8Gemms, Tiling, few_rows_linear, quantize_rows
from tandem.workers.kernels.triton.gemv import TritonGemv

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_fp8_weights.py runs there")
FORMS = {"rows": (1, 1 << 20), "blocks": (128, 128), "blocks of 64 in single rows": (1, 64)}
ROUNDING: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}  # of 16 bits


def scaled(
    form: str, rows: int, columns: int, *, experts: int = 0, biased: bool = False
) -> tuple[ScaledLinear, Tensor]:
    """A weight, and what it means in float32."""
    row_block, group = FORMS[form]
    group = min(group, columns)
    lead, generator = (experts,) if experts else (), torch.Generator().manual_seed(rows + columns)
    numbers = torch.randn(*lead, rows, columns, generator=generator).mul_(16).to(torch.float8_e4m3fn)
    grid = (-(-rows // row_block), -(-columns // group))
    scales = torch.rand(*lead, *grid, generator=generator).add_(0.5).div_(16 * columns**0.5)
    bias = torch.randn(*lead, rows, generator=generator).half() if biased else None
    wide = scales.repeat_interleave(row_block, -2)[..., :rows, :].repeat_interleave(group, -1)[..., :columns]
    return ScaledLinear(numbers, bias, scales=scales, row_block=row_block, group=group), numbers.float() * wide


def inputs(tokens: int, columns: int) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).half()


def exact_inputs(tokens: int, columns: int) -> Tensor:
    """Numbers that 8 bits hold, 448 among each 64 of them, times a power of 2. Triton's interpreter rounds others
    badly."""
    numbers = inputs(tokens, columns).float().mul_(16).to(torch.float8_e4m3fn).float()
    numbers[:, ::64] = 448
    return (numbers / 256).half()


@pytest.mark.parametrize("group", [128, 384])
def test_rows_are_quantized_by_the_largest_number_of_each_group(group: int) -> None:
    x = exact_inputs(5, 384)
    x[2] = 0
    numbers, scales = quantize_rows(x, group)
    largest = x.float().unflatten(1, (-1, group)).abs().amax(2)
    torch.testing.assert_close(scales, (largest / 448).clamp(min=1e-12))
    assert scales.stride() == (1, 5)
    padded, more = quantize_rows(x, group, 16)
    assert (padded.shape[0], more.shape[0], more.stride()) == (16, 16, (1, 16))
    assert torch.equal(padded[:5].float(), numbers.float())
    assert torch.equal(more[:5], scales)
    meant = numbers.float().unflatten(1, (-1, group)) * scales[:, :, None]
    torch.testing.assert_close(meant.flatten(1), x.float())


@pytest.mark.gate("*-blocks")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "splits", "biased"),
    [(3, 192, 512, 2, True), (16, 256, 384, 3, False), (20, 100, 200, 1, True), (70, 130, 256, 1, False)],
)
def test_few_rows_are_multiplied_by_the_dequantized_weight(
    form: str, tokens: int, rows: int, columns: int, splits: int, biased: bool
) -> None:
    weights, meant = scaled(form, rows, columns, biased=biased)
    x, counters = inputs(tokens, columns), torch.zeros(4, dtype=torch.int32)
    bias = None if weights.bias is None else weights.bias.float()
    expected = F.linear(x.float(), meant, bias)
    for _ in range(2):  # the counters are zeros again
        y = few_rows_linear(x, weights, counters, Tiling(16 if tokens <= 16 else 32, 64, splits, 3))
        torch.testing.assert_close(y.float(), expected, **ROUNDING)


@pytest.mark.gate("*-blocks")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns", "biased"), [(256, 512, False), (52, 5000, True), (128, 8192, False)])
def test_one_row_is_multiplied_by_the_dequantized_weight(form: str, rows: int, columns: int, biased: bool) -> None:
    weights, meant = scaled(form, rows, columns, biased=biased)
    x, norm = inputs(1, columns), RmsNorm(torch.rand(columns), 1e-6)
    bias = None if weights.bias is None else weights.bias.float()
    torch.testing.assert_close(TritonGemv().linear(x, weights).float(), F.linear(x.float(), meant, bias), **ROUNDING)
    normed = F.rms_norm(x.float(), (columns,), norm.weight, 1e-6)
    gate, up = F.linear(normed, meant, bias).half().float().chunk(2, 1)
    gated = TritonGemv().linear_silu_mul(x, weights, norm)
    torch.testing.assert_close(gated.float(), F.silu(gate).half().float() * up, **ROUNDING)


@pytest.mark.gate("*-blocks")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("tokens", "in_8_bits"), [(9, False), (9, True)])
def test_experts_multiply_by_dequantized_weights(
    form: str, tokens: int, in_8_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "QUANTIZED_ROWS", 16 if in_8_bits else 32)
    weights, meant = scaled(form, 192, 256, experts=4, biased=True)
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand(tokens, 4, generator=generator).topk(2).indices
    x = exact_inputs(tokens, 256) if in_8_bits else inputs(tokens, 256)
    blocks, scale = expert_blocks(experts, 4, 16), torch.rand(2 * tokens, generator=generator)
    y = grouped.grouped_linear(x, weights, blocks, scale, 2)
    dense = ScaledLinear(meant, weights.bias, scales=weights.scales, row_block=1, group=1)
    expected = reference(x.float(), dense, blocks, scale, 2)
    torch.testing.assert_close(y.float(), expected, **ROUNDING)


def test_a_gpu_multiplies_few_rows_by_sixteen_bits_and_one_row_by_a_gemv() -> None:
    weights, meant = scaled("blocks", 256, 512)
    multiply = Fp8Gemms(weights)
    for tokens in (1, 2, 33):
        x = inputs(tokens, 512)
        torch.testing.assert_close(multiply(x).float(), F.linear(x.float(), meant), **ROUNDING)
