"""Layouts of published quantized checkpoints, served: tokens equal those that transformers gives from the same files.

transformers dequantizes them itself, in float32 on the CPU. Weights lie in two files, often apart from their scales.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from tests.support.checkpoints import make_model
from tests.support.client_requests import GREEDY, complete_all
from tests.support.island import running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.quantized_checkpoints import (
    CHANNEL,
    DEEPSEEK,
    MXFP4,
    TENSOR,
    V4,
    Quantize,
    as_deepseek_v4,
    blocks_of,
    by_fours,
    by_rows,
    by_tensor_inverse,
    by_tensor_of_one,
    compressed_tensors,
    quantize_folder,
    split_folder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = (128, 128)
BLOCKS = DEEPSEEK | {"weight_block_size": list(BLOCK)}
KEPT_BY_QWEN = ["lm_head", "model.layers.0.input_layernorm", "model.layers.1.input_layernorm"]
DENSE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
EXPERTS = DENSE | {"moe_intermediate_size": 128}
# transformers takes blocks of even parts where they are cut off: all extents here are multiples of 128.
LATENT = EXPERTS | {"head_dim": 128, "qk_rope_head_dim": 128, "qk_nope_head_dim": 64, "v_head_dim": 64}
LATENT |= {"kv_lora_rank": 128, "q_lora_rank": 128}
V4_SIZES = {"hidden_size": 256, "head_dim": 128, "q_lora_rank": 128, "o_lora_rank": 64, "moe_intermediate_size": 128}
V4_SIZES |= {"index_head_dim": 32, "partial_rotary_factor": 0.125}


@dataclass(frozen=True)
class Published:
    family: str
    sizes: dict[str, Any]
    config: dict[str, Any]
    quantize: Quantize
    further: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # tensors that are stored and not served


def predicting_layer() -> dict[str, Tensor]:
    """Parts of DeepSeek-V3's layer 61, here 2, which predicts a further token."""
    made = blocks_of(BLOCK)("model.layers.2.eh_proj.weight", torch.ones(256, 512))
    return {name: tensor for name, tensor in made.items() if name != "meant"}


def predicting_block() -> dict[str, Tensor]:
    """Parts of DeepSeek-V4's block that predicts a further token: a product, and an expert."""
    quantize, made = as_deepseek_v4(BLOCK), dict[str, Tensor]()
    for name in ("mtp.0.attn.wkv.weight", "mtp.0.ffn.experts.0.w1.weight"):
        made |= quantize(name, torch.ones(256, 512))
    return {name: tensor for name, tensor in made.items() if name != "meant"}


PUBLISHED = {
    "Qwen3-8B-FP8": Published(
        "qwen3",
        DENSE,
        BLOCKS | {"modules_to_not_convert": KEPT_BY_QWEN},
        blocks_of(BLOCK, dtype=torch.bfloat16),
    ),
    "Qwen3-30B-A3B-FP8": Published("qwen3_moe", EXPERTS, BLOCKS, blocks_of(BLOCK, dtype=torch.bfloat16)),
    "DeepSeek-V3": Published("deepseek_v3", LATENT, BLOCKS, blocks_of(BLOCK), predicting_layer()),
    "Mistral-FP8": Published("mistral", DENSE, TENSOR | {"weight_block_size": None}, by_tensor_inverse),
    "Llama-FP8-dynamic": Published("llama", DENSE, CHANNEL, by_rows),
    "Qwen2-FP8": Published("qwen2", DENSE, compressed_tensors("tensor"), by_tensor_of_one),
    "Llama-FP8-block": Published(
        "llama", DENSE, compressed_tensors("block", block_structure=list(BLOCK)), blocks_of(BLOCK, "_scale")
    ),
    "gpt-oss": Published("gpt_oss", {}, MXFP4, by_fours),
    "DeepSeek-V4": Published("deepseek_v4", V4_SIZES, V4 | BLOCKS, as_deepseek_v4(BLOCK), predicting_block()),
}
PROMPTS = [random_prompt(11, seed=1), random_prompt(30, seed=2)]


def load_dequantized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> "PreTrainedModel":
    """Loads transformers' model of a quantized checkpoint, in float32."""
    from transformers.quantizers import quantizer_finegrained_fp8
    from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    if section["quant_method"] == "compressed-tensors":
        return load_oracle(without_rounded_activations(folder))
    # It asks for accelerate, and does not use it here.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    kind = {"fp8": FineGrainedFP8Config, "mxfp4": Mxfp4Config}[section["quant_method"]]
    return load_oracle(folder, quantization_config=kind(dequantize=True))


def without_rounded_activations(folder: Path) -> Path:
    """A copy in which only weights are quantized. With input_activations transformers rounds them in each forward.

    Its option dequantize=True does not, but rounds weights to the type of their scales, also for a float32 model.
    """
    copy = shutil.copytree(folder, folder.with_name("copy"))
    config = json.loads((copy / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_equal_those_of_transformers_from_the_same_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, folder = PUBLISHED[name], tmp_path / "model"
    make_model(one.family, **one.sizes).save_pretrained(folder)
    quantize_folder(folder, one.config, one.quantize)
    split_folder(folder, one.further)
    oracle = load_dequantized(folder, monkeypatch)
    with running_island(folder, {"model.dtype": "float32"}) as island:
        tokens = complete_all(island.address, PROMPTS, max_tokens=12, **GREEDY)
    assert tokens == [greedy(oracle, prompt, 12) for prompt in PROMPTS]
    assert {parameter.dtype for parameter in oracle.parameters()} == {torch.float32}  # nothing was left as it is stored
