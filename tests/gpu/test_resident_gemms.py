"""resident.cu against torch: product by product, in a graph whose kernels overlap, and in decode steps."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import Linear, RmsNorm
from tandem.workers.kernels.choice import choose_resident_gemms
from tandem.workers.kernels.skinny_gemm.resident import ResidentGemms, ResidentShape
from tandem.workers.kernels.triton.layer import TritonLayerKernels
from tandem.workers.models import small_batch_decoder
from tests.gpu.test_steps import GREEDY, Steps, tokens_of
from tests.support.checkpoints import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HIDDEN, INTERMEDIATE, HEADS, QKV = 1024, 3072, 2048, 4096
ERROR_RATIO = 1.05  # ours to torch's, both to float32
RESIDENT = {
    "hidden_size": 1024, "intermediate_size": 1024, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 600,
}  # fmt: skip
PROGRAM = (9, 16, 17, 20, 3, 20, 12, 5)
MOSTLY = 0.9  # of the tokens are the same: in bfloat16 some are near ties


def resident_gemms(dtype: torch.dtype) -> ResidentGemms:
    device = torch.empty(1, device="cuda").device  # a context is there
    kernels = choose_resident_gemms(ResidentShape(HIDDEN, INTERMEDIATE, HEADS, QKV, dtype), device)
    assert kernels is not None, "nvcc is needed"
    return kernels


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def weight_of(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return normal(rows, columns, dtype=dtype) / columns**0.5


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.float() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 9, 16, 17, 24, 32])
def test_products_are_as_exact_as_those_of_torch(rows: int, dtype: torch.dtype) -> None:
    kernels, torchs = resident_gemms(dtype), TritonLayerKernels()
    x, norm = normal(rows, HIDDEN, dtype=dtype), RmsNorm(normal(HIDDEN, dtype=dtype), 1e-6)
    qkv, gate_up = weight_of(QKV, HIDDEN, dtype), weight_of(2 * INTERMEDIATE, HIDDEN, dtype)
    normed = torchs.add_rms_norm(x, None, norm.weight, norm.eps)
    exact = F.rms_norm(x.float(), (HIDDEN,), norm.weight.float(), norm.eps)
    for ours, theirs, best in (
        (kernels.linear(x, Linear(qkv), norm), F.linear(normed, qkv), F.linear(exact, qkv.float())),
        (
            kernels.linear_silu_mul(x, Linear(gate_up), norm),
            silu_mul(F.linear(normed, gate_up)),
            silu_mul(F.linear(exact, gate_up.float())),
        ),
    ):
        assert error(ours, best) < ERROR_RATIO * error(theirs, best)
    for columns in (HEADS, INTERMEDIATE):
        weight, y = weight_of(HIDDEN, columns, dtype), normal(rows, columns, dtype=dtype)
        total, best = x.clone(), x.float() + F.linear(y.float(), weight.float())
        kernels.add_linear(total, y, Linear(weight))
        assert error(total, best) < ERROR_RATIO * error(x + F.linear(y, weight), best)


@pytest.mark.parametrize("rows", [16, 32])
def test_a_chain_in_a_graph_repeats_itself(rows: int) -> None:
    """Each product starts while the previous one runs. A product that read too early would read other numbers."""
    kernels, dtype = resident_gemms(torch.bfloat16), torch.bfloat16
    norm = RmsNorm(torch.ones(HIDDEN, device="cuda", dtype=dtype), 1e-6)
    layers = [(weight_of(2 * INTERMEDIATE, HIDDEN, dtype), weight_of(HIDDEN, INTERMEDIATE, dtype)) for _ in range(6)]
    begin = normal(rows, HIDDEN, dtype=dtype)
    x = begin.clone()

    def run() -> Tensor:
        x.copy_(begin)
        for up, down in layers:
            kernels.add_linear(x, kernels.linear_silu_mul(x, Linear(up), norm), Linear(down))
        return x

    expected = run().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(50):
        x.fill_(torch.nan)
        graph.replay()
        assert torch.equal(x, expected)
    y = begin.float()
    for up, down in layers:
        normed = F.rms_norm(y, (HIDDEN,), norm.weight.float(), norm.eps)
        y = y + F.linear(silu_mul(F.linear(normed, up.float())), down.float())
    assert error(expected, y) < 0.02


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_steps_with_them_go_on_as_without(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(family, **RESIDENT).save_pretrained(tmp_path)
    calls: list[int] = []
    add = ResidentGemms.add_linear

    def count(kernels: ResidentGemms, residual: Tensor, x: Tensor, weights: Linear) -> None:
        calls.append(x.shape[0])
        add(kernels, residual, x, weights)

    monkeypatch.setattr(ResidentGemms, "add_linear", count)
    ours = Steps(tmp_path, "bfloat16", graphs=True).run(GREEDY, PROGRAM)
    assert {16, 24, 32} <= set(calls)
    calls.clear()
    monkeypatch.setattr(small_batch_decoder, "choose_resident_gemms", lambda *_: None)
    theirs = Steps(tmp_path, "bfloat16", graphs=False).run(GREEDY, PROGRAM, chosen=ours)
    assert not calls
    pairs = [
        (mine[one], other[one]) for mine, other in zip(tokens_of(ours), tokens_of(theirs), strict=True) for one in mine
    ]
    assert len(pairs) == sum(PROGRAM)
    assert sum(mine == other for mine, other in pairs) > MOSTLY * len(pairs)
