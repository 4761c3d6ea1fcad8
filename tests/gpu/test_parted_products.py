"""Products that come in parts, which the norm after adds up: a decoder with them and one without."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tandem.workers.weights import dense
from tests.benchmarks.model_shapes import COMMON, SHAPES
from tests.gpu.test_streamed_gemms import NoPages, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [129, 200, 256])
def test_a_decoder_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    fields = COMMON | SHAPES["qwen3-8b"] | {"num_hidden_layers": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = load_decoder(tmp_path, load_config(tmp_path, "bfloat16"), load_format="dummy", device="cuda")
    tokens = torch.arange(rows, device="cuda")
    shapes: list[tuple[int, ...]] = []
    multiply = torch.bmm

    def count(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        shapes.append((*a.shape, b.shape[2]))
        return multiply(a, b, out_dtype=out_dtype)

    monkeypatch.setattr(torch, "bmm", count)
    logits: list[Tensor] = []
    for parted in (dense.PARTED_ROWS, ()):
        monkeypatch.setattr(dense, "PARTED_ROWS", parted)
        with torch.inference_mode():
            logits.append(model.forward(tokens, NoPages(64, tokens), None))
    assert shapes == 2 * [(2, rows, 6144, 4096)]
    assert error(logits[0], logits[1].float()) < 0.03
