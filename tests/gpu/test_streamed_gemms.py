"""streamed.cu against torch's products: alone, in chains that overlap, and in a decoder."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.plan.head_norm import HeadNorm
from tandem.workers.kernels.skinny_gemm.streamed import StreamedGemm, load_streamed_gemms
from tandem.workers.models import feed_forward
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.runner.memory_budget import WithoutPages
from tandem.workers.weights import dense
from tests.benchmarks.model_shapes import COMMON, SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU")
    if torch.cuda.is_available()
    else pytest.mark.skip,
]
HIDDEN, INNER = 4096, 12288
# Rows and columns of weights: what a Qwen3-8B has, and what does not fill its last tile.
PLAIN = [(6144, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INNER), (4016, 4224)]
GATED = [(2 * INNER, HIDDEN), (24416, 4160)]
ERROR_RATIO = 1.05  # ours to torch's, both to float32


def prepared(weight: Tensor, *, gated: bool) -> StreamedGemm:
    products = load_streamed_gemms(weight.device, weight.dtype)
    assert products is not None, "nvcc is needed"
    product = products.prepare(weight, gated=gated)
    assert product is not None
    StreamedGemm.chain([product])
    return product


def random_weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, columns, device="cuda", dtype=dtype) / columns**0.5


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def error(actual: Tensor, exact: Tensor) -> float:
    return float((actual.float() - exact).norm() / exact.norm())


class NoPages(WithoutPages):
    """Its output is a tensor of its own, as kernels' is."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, norm: HeadNorm | None
    ) -> Tensor:
        return super().attend(layer, q, k, v, sinks, norm).contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*PLAIN, *GATED], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_products_are_as_exact_as_those_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, gated = random_weight(*shape, dtype), shape in GATED
    product = prepared(weight, gated=gated)
    after = silu_mul if gated else torch.nn.Identity()
    for rows in (2, 9, 16, 17, 32, 33, 50, 64, 100, 128):
        x = torch.randn(rows, shape[1], device="cuda", dtype=dtype)
        if not product.takes(x):
            continue
        torch.full((rows, shape[0]), torch.nan, device="cuda", dtype=dtype)  # what the result's memory has before
        ours, exact = product(x), after(F.linear(x.float(), weight.float()))
        assert error(ours, exact) < ERROR_RATIO * error(after(F.linear(x, weight)), exact)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_chain_in_a_graph_repeats_itself(rows: int) -> None:
    """Each product starts while the previous one runs. A product that read too early would read other numbers."""
    ups = [random_weight(2 * INNER, HIDDEN) for _ in range(4)]
    downs = [random_weight(HIDDEN, INNER) for _ in range(4)]
    chain: list[StreamedGemm] = []
    for up, down in zip(ups, downs, strict=True):
        chain += [prepared(up, gated=True), prepared(down, gated=False)]
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run() -> Tensor:
        y = x
        for product in chain:
            y = product(y)
        return y

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    for _ in range(50):
        result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(result, expected)
    y = x.float()
    for up, down in zip(ups, downs, strict=True):
        y = F.linear(silu_mul(F.linear(y, up.float())), down.float())
    assert error(expected, y) < 0.02


@pytest.mark.parametrize("rows", [5, 16, 32, 40])
def test_a_decoder_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    fields = COMMON | SHAPES["qwen3-8b"] | {"num_hidden_layers": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(tmp_path, "bfloat16")
    tokens = torch.arange(rows, device="cuda")
    logits: list[Tensor] = []
    calls: list[StreamedGemm] = []
    call = StreamedGemm.__call__

    def count(product: StreamedGemm, x: Tensor) -> Tensor:
        calls.append(product)
        return call(product, x)

    monkeypatch.setattr(StreamedGemm, "__call__", count)
    for of in (True, False):
        if not of:
            for module in (dense, feed_forward):
                monkeypatch.setattr(module, "choose_streamed_gemm", lambda *_, **__: None)
        model = load_decoder(tmp_path, config, load_format="dummy", device="cuda")
        with torch.inference_mode():
            logits.append(model.forward(tokens, NoPages(64, tokens), None))
    assert len(calls) == 2 * 4
    assert error(logits[0], logits[1].float()) < 0.03
