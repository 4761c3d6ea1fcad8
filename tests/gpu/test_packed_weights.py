"""packed.cu and Triton's kernels for packed weights against products of their dequantized matrices."""

from typing import Any

import pytest
import torch

from tandem.workers.kernels.choice import choose_packed_kernels
from tandem.workers.kernels.expert_blocks import expert_blocks
from tandem.workers.kernels.packed_linear import PackedKernels, PackedLinear
from tandem.workers.kernels.skinny_gemm.packed import PackedGemms
from tandem.workers.kernels.torch.packed import TorchPacked, dequantize
from tandem.workers.kernels.triton.packed import TritonPacked
from tests.support.packed_weights import random_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES: dict[str, dict[str, Any]] = {
    "groups of 128": {"group": 128, "columns": 4096},
    "zeros": {"group": 32, "columns": 2880, "zeros": True, "bias": True},
    "a row": {"group": 1024, "columns": 1024},
    "act-order": {"group": 128, "columns": 1024, "act_order": True},
    "floats": {"group": 32, "columns": 2880, "is_float": True, "bias": True},
}
# Relative to the largest result. A rounding to bfloat16's 8 bits is off by up to 2^-8 of a result, and there are two:
# a kernel's, and another's of the same result. That is the reference's, or the one between parts of a sum over columns
# that cuBLAS adds up in bfloat16. The rest is for sums in float32, in another order.
TOLERANCE = 2 * 2**-8 + 2**-12


def draw(*shape: int, case: dict[str, Any], dtype: torch.dtype) -> PackedLinear:
    options = {name: value for name, value in case.items() if name != "columns"}
    return random_packed(*shape, case["columns"], dtype=dtype, device="cuda", **options)


def check(y: torch.Tensor, expected: torch.Tensor) -> None:
    error = (y.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < TOLERANCE, float(error)


def kernels_of(name: str, dtype: torch.dtype) -> PackedKernels:
    chosen = choose_packed_kernels(torch.device("cuda", 0), dtype)
    assert isinstance(chosen, PackedGemms), "nvcc is needed"
    return chosen if name == "chosen" else TritonPacked()


@pytest.mark.parametrize("name", ["chosen", "triton"])
@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.bfloat16) for case in CASES), ("zeros", torch.float16)], ids=str
)
def test_products_are_those_of_the_dequantized_matrix(case: str, dtype: torch.dtype, name: str) -> None:
    for rows in (1000, 8200):
        weights = draw(rows, case=CASES[case], dtype=dtype)
        matrix = dequantize(weights, 0, rows).to(dtype).float()
        for tokens in (1, 3, 8, 9, 16, 17, 40, 64, 300):
            x = torch.randn(tokens, weights.columns, device="cuda", dtype=dtype)
            expected = x.float() @ matrix.T + (0 if weights.bias is None else weights.bias.float())
            check(kernels_of(name, dtype).linear(x, weights), expected)


@pytest.mark.parametrize("name", ["chosen", "triton"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tokens", [1, 33, 400])
def test_experts_multiply_their_tokens(case: str, name: str, tokens: int) -> None:
    weights, dtype = draw(12, 200, case=CASES[case], dtype=torch.bfloat16), torch.bfloat16
    chosen = torch.rand(tokens, 12, device="cuda").argsort(1)[:, :4]
    width = 16 if tokens < 100 else 128
    blocks = expert_blocks(chosen, 12, width)
    x = torch.randn(tokens, weights.columns, device="cuda", dtype=dtype)
    factors = torch.rand(4 * tokens, device="cuda")
    expected = TorchPacked().grouped(x, weights, blocks, factors, 4)
    check(kernels_of(name, dtype).grouped(x, weights, blocks, factors, 4), expected)


def test_products_can_be_captured_in_a_chain() -> None:
    """Weights are fetched while the kernel before still runs, inputs not."""
    kernels = kernels_of("chosen", torch.bfloat16)
    weights = [random_packed(2048, 2048, group=128, dtype=torch.bfloat16, device="cuda") for _ in range(6)]
    x = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)

    def chain() -> torch.Tensor:
        y = x
        for one in weights:
            y = kernels.linear(y, one)
        return y

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
