"""FP8 and MXFP4 checkpoints: what is loaded, and that tokens equal those of transformers' dequantized model."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import Mxfp4Config

from tandem.workers.checkpoint import stored
from tandem.workers.checkpoint.errors import InvalidWeights
from tandem.workers.models.registry import load_config
from tandem.workers.models.weight_names import named_weights
from tandem.workers.models.weights import check_weights, load_parameters
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.island import running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.workers.models.quantized_checkpoints import (
    BLOCK,
    CHANNEL,
    DEEPSEEK,
    MXFP4,
    SINGLE,
    TENSOR,
    Quantize,
    by_blocks,
    by_fours,
    by_rows,
    by_tensor,
    quantize_folder,
)

BLOCKS_OF_COMPRESSED = CHANNEL | {
    "config_groups": {
        "group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)}}
    }
}
CASES: dict[str, tuple[str, dict[str, Any], Quantize]] = {
    "qwen3-blocks": ("qwen3", DEEPSEEK, by_blocks),
    "qwen3_moe-blocks": ("qwen3_moe", DEEPSEEK, by_blocks),
    "deepseek_v3-blocks": ("deepseek_v3", DEEPSEEK, by_blocks),
    "llama-channel": ("llama", CHANNEL, by_rows),
    "llama-blocks-of-compressed-tensors": ("llama", BLOCKS_OF_COMPRESSED, by_blocks),
    "mistral-tensor": ("mistral", TENSOR, by_tensor),
    "gpt_oss-mxfp4": ("gpt_oss", MXFP4, by_fours),
}
PROMPTS = [random_prompt(11, seed=1), random_prompt(30, seed=2)]


def save_quantized(case: str, folder: Path) -> dict[str, Tensor]:
    family, config, quantize = CASES[case]
    save_checkpoint(family, folder)
    return quantize_folder(folder, config, quantize)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_dequantized_into_the_models_dtype(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a weight takes many parts."""
    for module in ("fp8", "mxfp4"):
        monkeypatch.setattr(f"tandem.workers.checkpoint.{module}.PART_NUMBERS", 300)
    meant = save_quantized(case, tmp_path)
    config = load_config(tmp_path, dtype)
    check_weights(tmp_path, config)
    loaded = named_weights(config, load_parameters(tmp_path, config), meant)
    assert loaded.keys() == meant.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, meant[name].to(tensor.dtype)), name


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_the_dequantized_model(case: str, tmp_path: Path) -> None:
    meant = save_quantized(case, tmp_path / "model")
    plain = shutil.copytree(tmp_path / "model", tmp_path / "plain")
    save_checkpoint(CASES[case][0], plain)
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / SINGLE, {"format": "pt"})
    oracle = load_oracle(plain)
    with running_island(tmp_path / "model", {"model.dtype": "float32"}) as island:
        tokens = complete_all(island.address, PROMPTS, max_tokens=12, **GREEDY)
    assert tokens == [greedy(oracle, prompt, 12) for prompt in PROMPTS]


def test_experts_are_those_that_transformers_dequantizes(tmp_path: Path) -> None:
    save_quantized("gpt_oss-mxfp4", tmp_path)
    how = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.bfloat16)
    theirs = dict(model.state_dict())
    config = load_config(tmp_path, "bfloat16")
    ours = named_weights(config, load_parameters(tmp_path, config), theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor.bfloat16(), theirs[name]), name  # ours keeps norms in float32


def test_blocks_are_those_that_transformers_dequantizes(tmp_path: Path) -> None:
    """Where blocks are whole: it takes no others."""
    save_quantized("qwen3-blocks", tmp_path)
    stored_tensors = load_file(tmp_path / SINGLE)
    config = load_config(tmp_path, "bfloat16")
    ours = named_weights(config, load_parameters(tmp_path, config))
    compared = 0
    for name, tensor in ours.items():
        scales = stored_tensors.get(f"{name}_scale_inv")
        if scales is not None and not (tensor.shape[0] % BLOCK[0] or tensor.shape[1] % BLOCK[1]):
            theirs = Fp8Dequantize(None)._dequantize_one(stored_tensors[name], scales, torch.bfloat16)
            assert torch.equal(tensor, theirs), name
            compared += 1
    assert compared >= 8


def rewrite(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / SINGLE)
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / SINGLE)


Q = "model.layers.0.self_attn.q_proj.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("case", "name", "tensor", "message"),
    [
        ("qwen3-blocks", f"{Q}_scale_inv", None, rf"{Q} is stored as F8_E4M3; it must have {Q}_scale_inv or"),
        (
            "qwen3-blocks",
            f"{Q}_scale_inv",
            torch.ones(3, 3),
            r"shape \[3, 3\] beside a weight .* each block of \[32, 16\]",
        ),
        ("llama-channel", f"{Q}_scale", torch.ones(63, 1), r"shape \[63, 1\] .* quantization_config names no block"),
        ("qwen3-blocks", f"{Q}_scale_inv", torch.ones(2, 4, dtype=torch.int8), "scale_inv is stored as I8; a matrix"),
        ("qwen3-blocks", Q, torch.ones(64, 64, dtype=torch.uint8), f"{Q} is stored as U8; it must be one of F32"),
        ("gpt_oss-mxfp4", f"{EXPERTS}_scales", None, f"{EXPERTS}_blocks must have {EXPERTS}_scales beside it"),
        ("gpt_oss-mxfp4", f"{EXPERTS}_scales", torch.ones(5, 64, 2), r"they must be U8 of \[E, R, G, 16\] and"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    case: str, name: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    save_quantized(case, tmp_path)
    rewrite(tmp_path, name, tensor)
    with pytest.raises(InvalidWeights, match=message):
        check_weights(tmp_path, load_config(tmp_path))


def test_a_part_is_small() -> None:
    """So that loading takes little more than the weights themselves, however large a tensor is."""
    assert stored.PART_NUMBERS * 4 <= 4 << 20
