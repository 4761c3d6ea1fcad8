"""Weights in FP8 against the same weights dequantized, and which of a checkpoint's weights stay in FP8."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint.errors import UnsupportedFeature
from tandem.workers.models.parameters import AttentionParameters, DecoderParameters, GatedParameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_parameters
from tandem.workers.weights import fp8
from tandem.workers.weights.dense import Dense
from tandem.workers.weights.formats.format import Quantization
from tandem.workers.weights.fp8 import Fp8, Fp8Stack
from tests.support.quantized_checkpoints import (
    CHANNEL,
    DEEPSEEK,
    MODELOPT,
    Quantize,
    all_but,
    blocks_of,
    by_rows,
    by_tensor,
    quantize_folder,
)


def random_fp8(rows: int, columns: int, group: int, dtype: torch.dtype) -> tuple[Fp8, Tensor]:
    """A weight with a bias, and what it means in float32."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randn(rows, columns, generator=generator).mul_(64).to(torch.float8_e4m3fn)
    scales = torch.rand(rows, -(-columns // group), generator=generator) / 64
    bias = torch.randn(rows, generator=generator).to(dtype)
    meant = numbers.float() * scales.repeat_interleave(group, 1)[:, :columns]
    return Fp8(numbers, scales, bias, group, dtype), meant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "group"), [(40, 96, 32), (7, 100, 32), (64, 48, 48), (300, 8, 16)])
def test_products_rows_and_slices_are_those_of_the_dequantized_matrix(
    rows: int, columns: int, group: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a product takes several blocks of rows."""
    monkeypatch.setattr(fp8, "AT_ONCE", 10 * columns)
    weight, meant = random_fp8(rows, columns, group, dtype)
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(weight.tensor(), meant.to(dtype))
    assert torch.equal(weight.look_up(torch.tensor([3, 3, 0])), meant.to(dtype)[[3, 3, 0]])
    assert torch.equal(weight.slice(2, 6).tensor(), meant.to(dtype)[2:6])
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for part, begin, end in ((weight.prepare(), 0, rows), (weight.slice(2, 6).prepare(), 2, 6)):
        expected = F.linear(x, meant.to(dtype)[begin:end], None if weight.bias is None else weight.bias[begin:end])
        torch.testing.assert_close(part.linear(x), expected, rtol=rounding, atol=rounding)


def test_each_weight_of_a_stack_multiplies_its_own_rows() -> None:
    pairs = [random_fp8(24, 32, 16, torch.float32) for index in range(3)]
    numbers, scales = (torch.stack([getattr(one, name) for one, _ in pairs]) for name in ("numbers", "scales"))
    stack, x = Fp8Stack(numbers, scales, None, 16, torch.float32), torch.randn(3, 2, 32)
    for index, y in enumerate(stack.prepare()(x)):
        torch.testing.assert_close(y, F.linear(x[index], pairs[index][1]))


def test_rows_of_a_block_keep_one_scale_and_others_their_own() -> None:
    """Kernels get as many scales as a checkpoint has, if rows are in the checkpoint's order."""
    scales = torch.rand(3, 4).repeat_interleave(128, 0)[:300]
    compact, row_block = fp8._compact(scales)
    assert row_block == 128
    assert torch.equal(compact, scales[::128])
    scales[5, 1] += 1
    assert fp8._compact(scales)[1] == 1
    assert fp8._compact(torch.ones(300, 1))[1] == 1


def test_modelopts_config_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    quantize_folder(tmp_path, MODELOPT | {"kv_cache_quant_algo": "FP8"}, by_tensor)
    assert load_config(tmp_path).quantization == Quantization("fp8", None, ("lm_head",), fp8_kv=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["quantization_config"] = MODELOPT | {"quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedFeature, match="quant_algo is 'NVFP4'; it must be 'FP8' or 'FP8_PER_CHANNEL"):
        load_config(tmp_path)


def load(folder: Path, config: dict[str, Any], quantize: Quantize) -> DecoderParameters:
    make_checkpoint(folder, "llama")
    quantize_folder(folder, config, quantize)
    return load_parameters(folder, load_config(folder, "float32"))


def test_weights_stay_as_they_are_stored(tmp_path: Path) -> None:
    """A byte a number, beside scales; what the config leaves unquantized, embeddings and heads are dense."""
    parameters = load(tmp_path, CHANNEL | {"ignore": ["re:.*down_proj$"]}, all_but("down_proj", by_rows))
    for layer in parameters.layers:
        assert isinstance(layer.attention, AttentionParameters)
        assert isinstance(layer.feed_forward, GatedParameters)
        for weight in (layer.attention.qkv, layer.attention.o, layer.feed_forward.gate_up):
            assert isinstance(weight, Fp8)
            assert weight.numbers.nbytes == weight.rows * weight.columns
            assert weight.scales.nbytes == 4 * weight.rows
        assert type(layer.feed_forward.down) is Dense
    assert type(parameters.embedding) is type(parameters.lm_head) is Dense


def test_a_fused_weight_with_unlike_parts_is_dequantized(tmp_path: Path) -> None:
    parameters = load(tmp_path, DEEPSEEK, all_but("up_proj", blocks_of((32, 16))))
    for layer in parameters.layers:
        assert isinstance(layer.feed_forward, GatedParameters)
        assert type(layer.feed_forward.gate_up) is Dense
        assert type(layer.feed_forward.down) is Fp8


def test_dummy_weights_are_drawn_in_fp8(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    fields = json.loads((tmp_path / "config.json").read_text())
    kept = {"modules_to_not_convert": ["model.layers.0.mlp"]}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": DEEPSEEK | kept}))
    config = load_config(tmp_path, "float32")
    first, second = load_parameters(tmp_path, config, load_format="dummy").layers[:2]
    assert type(first.attention.qkv) is type(second.attention.qkv) is Fp8  # type: ignore[union-attr]
    assert isinstance(first.feed_forward, GatedParameters)
    assert isinstance(second.feed_forward, GatedParameters)
    assert type(first.feed_forward.down) is Dense
    down = second.feed_forward.down
    assert type(down) is Fp8
    assert down.scales.shape == (down.rows, -(-down.columns // 16))
    assert float(down.tensor().std()) == pytest.approx(float(first.feed_forward.down.tensor().std()), rel=0.05)
