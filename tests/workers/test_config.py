"""config.json into ModelConfig: both spellings of transformers, and each thing that is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.workers.models.errors import CheckpointMissing, InvalidConfig, UnknownArchitecture, UnsupportedFeature
from tandem.workers.models.registry import load_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}


def write(folder: Path, fields: dict[str, Any], name: str = "config.json") -> Path:
    (folder / name).write_text(json.dumps(fields))
    return folder


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, LLAMA))
    assert config.head_dim == 16
    assert config.dtype == torch.float32
    assert not any([config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings])
    assert config.rms_norm_eps == 1e-6
    assert config.eos_token_ids == ()
    assert load_config(write(tmp_path, QWEN3)).head_dim == 128
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert load_config(write(tmp_path, without)).num_kv_heads == 4


def test_biases_and_norms_are_the_families(tmp_path: Path) -> None:
    qwen2 = load_config(write(tmp_path, QWEN2))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = load_config(write(tmp_path, {**QWEN3, "attention_bias": True}))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, True)
    llama = load_config(write(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True}))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


def test_old_and_new_spelling_of_rope_agree(tmp_path: Path) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
    new = load_config(write(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **yarn}}))
    old = load_config(write(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **yarn}}))
    assert new.rope == old.rope
    assert new.rope.theta == 5e5
    default = load_config(write(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": None}))
    assert default.rope.rope_type == "default"
    assert default.rope.theta == 5e5


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_dtype_is_read_and_overridden(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, {**LLAMA, name: "bfloat16"})
    assert load_config(folder).dtype == torch.bfloat16
    assert load_config(folder, "float16").dtype == torch.float16
    with pytest.raises(InvalidConfig, match=r"'int8'; it must be auto or one of float32, float16, bfloat16"):
        load_config(folder, "int8")


def test_generation_config_has_the_last_word_on_eos(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "eos_token_id": 2, "bos_token_id": 1})
    assert load_config(tmp_path).eos_token_ids == (2,)
    assert load_config(tmp_path).bos_token_id == 1
    write(tmp_path, {"eos_token_id": [5, 7]}, "generation_config.json")
    assert load_config(tmp_path).eos_token_ids == (5, 7)
    write(tmp_path, {"temperature": 0.7}, "generation_config.json")
    assert load_config(tmp_path).eos_token_ids == (2,)


def test_missing_or_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match="nowhere is not there; it must be a folder with config"):
        load_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointMissing, match=r"config\.json is not there"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 3,')
    with pytest.raises(InvalidConfig, match=r"config\.json is not readable JSON: .*line 1"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidConfig, match="holds a list; it must hold a JSON object"):
        load_config(tmp_path)


def test_unknown_architecture_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalML"]})
    with pytest.raises(UnknownArchitecture, match=r"the nearest is LlamaForCausalLM\. Known: .*Qwen3ForCausalLM"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, {key: value for key, value in LLAMA.items() if key != name})
    with pytest.raises(InvalidConfig, match=f"{name} is missing; it must be an integer"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": []}, "architectures is \\[\\]; it must be a list with one of LlamaForCausalLM"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be an integer of at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer of at least 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of num_attention_heads, 4"),
        ({"head_dim": 15}, "head_dim is 15; it must be even"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; it must be a finite number of at least 0"),
        ({"dtype": "int4"}, "dtype is 'int4'; it must be one of float32"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'; it must be a token id or a list"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write(tmp_path, {**LLAMA, **fields})
    with pytest.raises(InvalidConfig, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window is in effect"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantization_config asks for 'gptq'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'; only default, linear"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFeature, match=message):
        load_config(write(tmp_path, fields))


QWEN2_WINDOW = {**QWEN2, "use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (MISTRAL, None),
        ({**MISTRAL, "sliding_window": 9}, (9, 9)),
        ({**LLAMA, "architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({**QWEN2_WINDOW, "use_sliding_window": False}, None),
        (QWEN2_WINDOW, None),
        ({**QWEN2_WINDOW, "max_window_layers": 1}, (None, 64)),
        ({**QWEN2_WINDOW, "max_window_layers": 0}, (64, 64)),
        ({**QWEN2_WINDOW, "architectures": ["Qwen3ForCausalLM"], "max_window_layers": 1}, (None, 64)),
        ({**QWEN2_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, (64, None)),
    ],
)
def test_windows_of_the_layers(tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, ...] | None) -> None:
    assert load_config(write(tmp_path, fields)).layer_windows == windows
