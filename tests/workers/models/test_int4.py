"""Checkpoints of integers in 4 bits: what is loaded, packed and dequantized, whole and by ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.workers.models.parameters import AttentionParameters
from tandem.workers.models.registry import load_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import check_weights, load_parameters
from tandem.workers.weights.packed import Packed, PackedStack
from tests.support.checkpoints import save_checkpoint
from tests.support.dense_parameters import in_dense
from tests.support.int4_checkpoints import AWQ, as_awq, as_gptq, as_pack_quantized, gptq, pack_quantized
from tests.support.quantized_checkpoints import Quantize, all_but, quantize_folder

WHOLE_ROW = -1
CASES: dict[str, tuple[str, dict[str, Any], Quantize]] = {
    "llama-awq": ("llama", AWQ, as_awq()),
    "qwen3_moe-awq": ("qwen3_moe", AWQ | {"group_size": 8}, as_awq(8)),
    "llama-awq-not-converted": (
        "llama",
        AWQ | {"modules_to_not_convert": ["model.layers.0.self_attn"]},
        all_but("layers.0.self_attn", as_awq()),
    ),
    "llama-gptq": ("llama", gptq(), as_gptq()),
    "llama-gptq-asymmetric": ("llama", gptq(sym=False), as_gptq(sym=False)),
    "llama-gptq-act-order": ("llama", gptq(sym=False, act_order=True), as_gptq(sym=False, act_order=True)),
    "llama-gptq-2": (
        "llama",
        gptq(sym=False, version="gptq_v2"),
        as_gptq(sym=False, version="gptq_v2"),
    ),
    "llama-gptq-rows": ("llama", gptq(group=WHOLE_ROW), as_gptq(group=WHOLE_ROW)),
    "qwen3_moe-gptq-act-order": ("qwen3_moe", gptq(act_order=True, group=8), as_gptq(act_order=True, group=8)),
    "llama-pack-quantized": ("llama", pack_quantized(), as_pack_quantized()),
    "llama-pack-quantized-asymmetric": ("llama", pack_quantized(symmetric=False), as_pack_quantized(symmetric=False)),
    "llama-pack-quantized-rows": ("llama", pack_quantized(None), as_pack_quantized(None)),
    "llama-pack-quantized-act-order": ("llama", pack_quantized(act_order=True), as_pack_quantized(act_order=True)),
    "deepseek_v3-pack-quantized": ("deepseek_v3", pack_quantized(8), as_pack_quantized(8)),
}


def save_int4(case: str, folder: Path) -> dict[str, Tensor]:
    """The weights as they count, float32."""
    family, config, quantize = CASES[case]
    save_checkpoint(family, folder)
    return quantize_folder(folder, config, quantize)


@pytest.mark.parametrize("case", CASES)
def test_weights_stay_packed_and_mean_what_was_stored(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a weight takes many parts."""
    monkeypatch.setattr("tandem.workers.weights.formats.int4.PART_NUMBERS", 1000)
    meant = save_int4(case, tmp_path)
    config = load_config(tmp_path, "float32")
    check_weights(tmp_path, config)
    parameters = load_parameters(tmp_path, config)
    packed = [type(one) for layer in parameters.layers for one in matrices(layer)]
    kept = 1 if case == "llama-awq-not-converted" else 0
    assert len([one for one in packed if one in (Packed, PackedStack)]) >= len(packed) - 2 * kept
    for name, tensor in named_weights(config, in_dense(parameters), meant).items():
        assert torch.equal(tensor, meant[name].to(tensor.dtype)), name


def matrices(layer: Any) -> list[Any]:
    attention, feed_forward = layer.attention, layer.feed_forward
    held = [attention.o, feed_forward.gate_up, feed_forward.down]
    return [*held, attention.qkv] if isinstance(attention, AttentionParameters) else [*held, attention.down]
