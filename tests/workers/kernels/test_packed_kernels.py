"""Products with packed weights against float64 products of numbers unpacked one by one: torch's, and Triton's on a GPU,
else in its interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.workers.kernels.expert_blocks import expert_blocks
from tandem.workers.kernels.packed_linear import PackedKernels
from tandem.workers.kernels.torch.packed import TorchPacked, dequantize, one_of
from tests.support.packed_weights import naive_matrix, random_packed
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.workers.kernels.triton import packed as triton_packed
from tandem.workers.kernels.triton.packed import TritonPacked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES: dict[str, dict[str, Any]] = {
    "one group": {"group": 96, "columns": 96},
    "groups as wide as tiles": {"group": 128, "columns": 256},
    "several groups in a tile": {"group": 32, "columns": 160, "zeros": True},
    "groups of no power of two": {"group": 48, "columns": 144},
    "small odd groups": {"group": 24, "columns": 72, "zeros": True, "bias": True},
    "order of activations": {"group": 32, "columns": 128, "zeros": True, "act_order": True},
    "floats": {"group": 32, "columns": 192, "is_float": True, "bias": True},
}
KERNELS = {"torch": TorchPacked(), "triton": TritonPacked()}


@pytest.mark.gate("21-torch-*", "21-triton-several*", "21-triton-order*", "21-triton-floats", "1-triton-groups as*")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("tokens", [1, 21])
def test_products_equal_those_of_unpacked_numbers(
    kernels: PackedKernels, case: dict[str, Any], tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.workers.kernels.torch.packed.BLOCK_NUMBERS", 1000)
    weights = random_packed(70, case["columns"], device=DEVICE, **{k: v for k, v in case.items() if k != "columns"})
    x = torch.randn(tokens, 2 * weights.columns, device=DEVICE)[:, : weights.columns]
    expected = x.double().cpu() @ naive_matrix(weights).T
    if weights.bias is not None:
        expected += weights.bias.double().cpu()
    assert_close(kernels.linear(x, weights).cpu(), expected)


@pytest.mark.gate("several*", "order*")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_many_tokens_are_multiplied_by_a_scratch_matrix(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_packed, "MANY", 4)
    monkeypatch.setattr(triton_packed, "SCRATCH_NUMBERS", 5000)
    weights = random_packed(70, case["columns"], device=DEVICE, **{k: v for k, v in case.items() if k != "columns"})
    x = torch.randn(5, weights.columns, device=DEVICE)
    expected = TorchPacked().linear(x, weights)
    assert_close(TritonPacked().linear(x, weights), expected.double())


@pytest.mark.gate("torch-*", "triton-order*", "triton-floats")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS.keys())
def test_each_token_is_multiplied_by_its_experts(kernels: PackedKernels, case: dict[str, Any]) -> None:
    options = {name: value for name, value in case.items() if name != "columns"}
    weights = random_packed(3, 20, case["columns"], device=DEVICE, **options)
    generator = torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(9)])
    x = torch.randn(9, weights.columns, generator=generator).to(DEVICE)
    factors = torch.rand(18, generator=generator).to(DEVICE)
    y = kernels.grouped(x, weights, expert_blocks(chosen.to(DEVICE), 3, 16), factors, 2)
    for pair, expert in enumerate(chosen.flatten().tolist()):
        one = one_of(weights, expert)
        expected = naive_matrix(one) @ x[pair // 2].double().cpu()
        expected += 0 if one.bias is None else one.bias.double().cpu()
        assert_close(y[pair].cpu(), expected * factors[pair].double().cpu())


def test_every_byte_with_every_exponent_is_dequantized_alike() -> None:
    weights = random_packed(255, 512, group=512, is_float=True, device=DEVICE)
    weights.numbers.copy_(torch.arange(256, dtype=torch.uint8).expand(255, 256))
    weights.scales.copy_(torch.arange(255, dtype=torch.uint8)[:, None])
    expected: Tensor = naive_matrix(weights)
    assert torch.equal(dequantize(weights, 0, 255).cpu(), expected.float())
