"""config.json into ModelConfig: both spellings of transformers, and each thing that is refused."""

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tandem.cache.plan.rope import inverse_frequencies
from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig, UnknownArchitecture, UnsupportedFeature
from tandem.workers.models.activation import ClampedSwiglu
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
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 6}
GEMMA3 = {**GEMMA2, "architectures": ["Gemma3ForCausalLM"]}
GPT_OSS = {
    **MIXTRAL,
    "architectures": ["GptOssForCausalLM"],
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 64},
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
SEED_OSS = {**LLAMA, "architectures": ["SeedOssForCausalLM"]}


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
    assert {load_config(write(tmp_path, fields)).head_dim for fields in (QWEN3, SEED_OSS)} == {128}
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert load_config(write(tmp_path, without)).num_kv_heads == 4


@pytest.mark.parametrize(("fields", "eps"), [(MIXTRAL, 1e-5), (PHI3, 1e-5), (GPT_OSS, 1e-5), (GEMMA2, 1e-6)])
def test_the_epsilon_of_norms_is_the_familys_where_it_is_absent(
    tmp_path: Path, fields: dict[str, Any], eps: float
) -> None:
    assert load_config(write(tmp_path, fields)).rms_norm_eps == eps


def test_biases_and_norms_are_the_families(tmp_path: Path) -> None:
    qwen2 = load_config(write(tmp_path, QWEN2))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = load_config(write(tmp_path, {**QWEN3, "attention_bias": True}))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, True)
    seed_oss = load_config(write(tmp_path, SEED_OSS))
    assert (seed_oss.qkv_bias, seed_oss.o_bias, seed_oss.mlp_bias) == (True, False, False)
    llama = load_config(write(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True}))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)


def test_old_and_new_spelling_of_rope_agree(tmp_path: Path) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
    new = load_config(write(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **yarn}}))
    old = load_config(write(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **yarn}}))
    assert new.rope == old.rope
    assert new.rope.theta == 5e5
    both = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **yarn}, "rope_scaling": {}}
    assert load_config(write(tmp_path, {**LLAMA, **both})).rope == old.rope
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


F16, BF16, F32, F8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"z": F16, "a": BF16, "m": F32}, BF16),
        ({"b": F16, "a.scale": torch.uint8, "a": F8}, F16),  # quantized weights have no dtype to compute in
        ({"a": torch.int64}, F32),
    ],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_dtype_is_that_of_the_weights_where_the_config_names_none(
    tmp_path: Path, stored: dict[str, torch.dtype], expected: torch.dtype, indexed: bool
) -> None:
    """The first weight by name in the first file has the dtype, as in transformers."""
    from safetensors.torch import save_file
    from transformers.modeling_utils import get_state_dict_dtype, load_state_dict

    file = tmp_path / ("one.safetensors" if indexed else "model.safetensors")
    save_file({name: torch.ones(4).to(dtype) for name, dtype in stored.items()}, file)
    if indexed:
        save_file({"0": torch.ones(1, dtype=F32)}, tmp_path / "two.safetensors")
        weight_map = {"0": "two.safetensors"} | dict.fromkeys(stored, "one.safetensors")
        write(tmp_path, {"weight_map": weight_map}, "model.safetensors.index.json")
    folder = write(tmp_path, {**LLAMA, "torch_dtype": None})
    assert load_config(folder).dtype == expected
    if expected != F32:
        assert get_state_dict_dtype(load_state_dict(file, map_location="meta")) == expected
    assert load_config(folder, "float16").dtype == F16
    assert load_config(write(tmp_path, {**LLAMA, "torch_dtype": "float32"})).dtype == F32


def test_dtype_of_a_nested_config_precedes_that_of_the_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1, dtype=BF16)}, tmp_path / "model.safetensors")
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "eos_token_id": [3, 5], "bos_token_id": 4}
    text = {**MIXTRAL, "num_key_value_heads": 2}
    assert load_config(write(tmp_path, {**whole, "text_config": text})).dtype == BF16
    config = load_config(write(tmp_path, {**whole, "text_config": {**text, "dtype": "float16", "eos_token_id": 7}}))
    assert (config.dtype, config.eos_token_ids, config.bos_token_id) == (F16, (7,), 4)


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


def test_unknown_architecture_names_those_that_are_served(tmp_path: Path) -> None:
    write(tmp_path, {**LLAMA, "architectures": ["LlamaForCausalML"]})
    with pytest.raises(UnknownArchitecture, match=r"LlamaForCausalML is not served\. Served: .*Qwen3ForCausalLM"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, {key: value for key, value in LLAMA.items() if key != name})
    with pytest.raises(InvalidConfig, match=f"{name} is missing; it must be an integer"):
        load_config(tmp_path)


FP8_KV = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": []}, "architectures is \\[\\]; it must be a list with one of DeepseekV2ForCausalLM"),
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
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing; it must be a list of numbers"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, "2"]}}, "it must be a list of finite numbers"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 10**400]}}, "a list of finite numbers"),
        ({"rope_theta": 10**400}, "0; it must be a finite number of at least 0"),
        ({"max_position_embeddings": 1 << 31}, "max_position_embeddings is 2147483648; it must be at most 2147483647"),
        ({"rope_theta": math.nan}, "rope_theta is nan; it must be a finite number of at least 0"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]}},
            "'longrope' needs 8 numbers above 0",
        ),
        ({"num_hidden_layers": 1_000_000}, "num_hidden_layers is 1000000; it must be at most 1000"),
        ({"num_attention_heads": 1_000_000}, "num_attention_heads is 1000000; it must be at most 16384"),
        ({"vocab_size": 1 << 24}, "vocab_size is 16777216; it must be at most 16777215"),
        ({"eos_token_id": [7] * 5000}, "eos_token_id is .{,60}; it must be at most 4096 token ids, and not 5000"),
        ({"vocab_size": int("9" * 4000)}, "vocab_size is .{,100}; it must be at most"),
        ({"layer_types": ["full_attention"] * 100_000}, "layer_types is .{,200}; it must"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            "weight_block_size is .128.; it must be two integers from 1 to 65536",
        ),
        (
            {"quantization_config": FP8_KV | {"config_groups": {"a": {"weights": {"strategy": "block"}}}}},
            "config_groups: a: weights: block_structure is None; it must be two integers from 1 to 65536",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["re:("]}},
            "modules_to_not_convert is .'re:.'.; it must be a list of names of modules, or of regular expressions",
        ),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
    ],
)
def test_a_bad_value_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write(tmp_path, {**LLAMA, **fields})
    with pytest.raises(InvalidConfig, match=message):
        load_config(tmp_path)


def test_a_checkpoint_may_ask_for_kv_in_fp8(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    assert not load_config(tmp_path).quantization.fp8_kv
    write(tmp_path, {**LLAMA, "quantization_config": FP8_KV})
    assert load_config(tmp_path).quantization.fp8_kv


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "no sliding_window is in effect"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, "layer_types has linear_attention"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu, swish, gelu_pytorch_tanh"),
        ({**LLAMA, "quantization_config": {"quant_method": "hqq"}}, "quantization_config: quant_method is 'hqq'; it"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 8}}, "quantization_config: bits is 8; it"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4, "zero_point": False}},
            "quantization_config: zero_point is False; it must be True",
        ),
        ({**LLAMA, "quantization_config": {"load_in_4bit": True}}, "quant_method is None; it must be 'fp8' or"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt is 'e5m2'; it must be 'e4m3'"),
        (
            {**LLAMA, "quantization_config": FP8_KV | {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}},
            "config_groups: group_0: weights: num_bits is 4; it must be 8",
        ),
        (
            {**LLAMA, "quantization_config": FP8_KV | {"config_groups": {"group_0": {"weights": {"type": "int"}}}}},
            "config_groups: group_0: weights: type is 'int'; it must be 'float'",
        ),
        (
            {**LLAMA, "quantization_config": FP8_KV | {"config_groups": {"a": {"weights": {"strategy": "group"}}}}},
            "config_groups: a: weights: strategy is 'group'; it must be 'tensor' or 'channel' or 'block'",
        ),
        (
            {**LLAMA, "quantization_config": FP8_KV | {"config_groups": {"a": {}}, "format": "marlin-24"}},
            "quantization_config: format is 'marlin-24'; it must be 'float-quantized' or",
        ),
        (
            {**LLAMA, "quantization_config": FP8_KV | {"config_groups": {"a": {}}, "format": "pack-quantized"}},
            "quantization_config: config_groups: a: weights: num_bits is None; it must be 4",
        ),
        ({**LLAMA, "quantization_config": {"quant_method": "compressed-tensors"}}, "has neither config_groups nor kv"),
        (
            {**LLAMA, "quantization_config": FP8_KV | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}},
            "kv_cache_scheme: type is 'int'; it must be 'float'",
        ),
        (
            {**LLAMA, "quantization_config": FP8_KV | {"kv_cache_scheme": {"type": "float", "dynamic": True}}},
            "kv_cache_scheme: dynamic is True; it must be False",
        ),
        (
            {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention is true; only causal",
        ),
        (
            {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is 50.0; it must be null",
        ),
        ({**LLAMA, "architectures": ["Gemma2ForCausalLM"], "hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({**LLAMA, "rope_scaling": {"rope_type": "ntk"}}, "rope_type is 'ntk'; only default, linear"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; this family takes only 1"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs between layers"),
    ],
)
def test_what_is_not_implemented_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedFeature, match=message):
        load_config(write(tmp_path, fields))


def test_which_layers_have_experts(tmp_path: Path) -> None:
    mixtral = load_config(write(tmp_path, MIXTRAL)).moe
    assert mixtral is not None
    assert (mixtral.layers, mixtral.intermediate_size, mixtral.routing.normalize) == ({0, 1}, 96, True)
    every = load_config(write(tmp_path, QWEN3_MOE)).moe
    assert every is not None
    assert (every.layers, every.intermediate_size, every.routing.normalize) == ({0, 1, 2, 3, 4, 5}, 32, False)
    some = load_config(write(tmp_path, {**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1, 2]})).moe
    assert some is not None
    assert some.layers == {3, 5}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts is missing; it must be an integer"),
        (
            {**MIXTRAL, "num_experts_per_tok": 9},
            "num_experts_per_tok is 9; it must be at most the number of experts, 8",
        ),
        ({**QWEN3_MOE, "moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be an integer of at least 1"),
        ({**QWEN3_MOE, "mlp_only_layers": "1"}, "mlp_only_layers is '1'; it must be a layer index or a list of layer"),
    ],
)
def test_bad_experts_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        load_config(write(tmp_path, fields))


def test_longrope(tmp_path: Path) -> None:
    """The names of the first checkpoints, and a part of each head."""
    scaling = {"type": "su", "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [8.0] * 4}
    fields = {**PHI3, "rope_scaling": scaling, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}
    config = load_config(write(tmp_path, fields))
    assert (config.rope.rope_type, config.rope.rotary_dim, config.rope.factor) == ("longrope", 8, 4.0)
    assert (config.rope_switch, config.max_length) == (32, 128)


def scaled(rope_type: str, factor: float, original: int | None = None) -> dict[str, Any]:
    lengths = {} if original is None else {"original_max_position_embeddings": original}
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if rope_type == "llama3" else {}
    return {"rope_type": rope_type, "factor": factor, **lengths, **bands}


@pytest.mark.parametrize(
    ("fields", "scaling", "length"),
    [
        ({**QWEN3, "max_position_embeddings": 40_960}, scaled("yarn", 4.0, 32_768), 131_072),
        ({**QWEN3, "max_position_embeddings": 32_768}, scaled("yarn", 4.0), 131_072),
        ({**QWEN3, "max_position_embeddings": 131_072}, scaled("yarn", 2.0, 32_768), 65_536),
        ({**GPT_OSS, "max_position_embeddings": 131_072}, scaled("yarn", 32.0, 4096), 131_072),
        ({**LLAMA, "max_position_embeddings": 16_384}, scaled("linear", 4.0), 65_536),
        ({**LLAMA, "max_position_embeddings": 4096}, scaled("dynamic", 2.5), 10_240),
        ({**LLAMA, "max_position_embeddings": 131_072}, scaled("llama3", 8.0, 8192), 131_072),
        ({**GEMMA3, "max_position_embeddings": 131_072}, scaled("linear", 8.0), 131_072),
        ({**LLAMA, "max_position_embeddings": 4096}, {}, 4096),
    ],
)
def test_lengths_are_those_that_vllm_derives(
    tmp_path: Path, fields: dict[str, Any], scaling: dict[str, Any], length: int
) -> None:
    """Its factor multiplies the length, of YaRN the original one; not with llama3 and longrope, nor of Gemma 3."""
    assert load_config(write(tmp_path, {**fields, "rope_scaling": scaling})).max_length == length


@pytest.mark.parametrize("length", [4096, 8192, 131_072])
@pytest.mark.parametrize("within", [{}, {"original_max_position_embeddings": 2048}])
def test_longrope_switches_where_transformers_does(tmp_path: Path, within: dict[str, int], length: int) -> None:
    """Also where no original length stands beside the object."""
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [8.0] * 8, **within}
    fields = {**PHI3, "model_type": "phi3", "rope_scaling": scaling, "max_position_embeddings": length}
    folder = write(tmp_path, fields)
    rope, theirs = load_config(folder).rope, cast(Any, Phi3Config.from_pretrained(folder))
    assert rope.original_max_position_embeddings == theirs.rope_parameters["original_max_position_embeddings"]
    _, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](theirs, torch.device("cpu"))
    assert inverse_frequencies(rope)[1] == attention_factor


def test_gemma_2_without_most_fields_is_that_of_transformers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GEMMA2))
    assert (config.head_dim, config.attn_scale, config.attn_softcap, config.final_softcap) == (256, 1 / 16, 50, 30)
    assert config.tie_word_embeddings
    assert config.layer_windows == (4096, None) * 3
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None}
    config = load_config(write(tmp_path, {**GEMMA2, **none}))
    assert (config.attn_softcap, config.final_softcap, config.layer_windows) == (None, None, None)


@pytest.mark.parametrize("name", ["query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"])
def test_gemma_divides_by_no_zero(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} is 0.0; it must be a finite number above 0"):
        load_config(write(tmp_path, {**GEMMA2, name: 0.0}))


def test_gemma_3_old_and_new_spelling_agree(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": linear, "sliding_window_pattern": 3}
    new = {
        "rope_parameters": {
            "full_attention": {**linear, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }
    configs = [load_config(write(tmp_path, {**GEMMA3, "sliding_window": 9, **fields})) for fields in (old, new)]
    assert configs[0] == configs[1]
    assert configs[0].layer_windows == (9, 9, None) * 2
    assert configs[0].local_rope is not None
    assert (configs[0].rope.theta, configs[0].rope.factor) == (2e6, 8.0)
    assert (configs[0].local_rope.theta, configs[0].local_rope.factor) == (5e3, 1.0)
    plain = load_config(write(tmp_path, GEMMA3))
    assert plain.local_rope is not None
    assert (plain.rope.theta, plain.local_rope.theta) == (1e6, 1e4)
    assert plain.layer_windows == (4096,) * 5 + (None,)


def test_gpt_oss(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, GPT_OSS))
    assert (config.head_dim, config.layer_windows, config.rope.theta) == (64, (128, None), 150_000)
    assert not config.rope.truncate
    assert config.activation == ClampedSwiglu(1.702, 7.0)
    assert config.moe is not None
    assert config.moe.bias
    with pytest.raises(InvalidConfig, match="rope_scaling is missing"):
        load_config(write(tmp_path, {**GPT_OSS, "rope_scaling": None}))


QWEN2_WINDOW = {**QWEN2, "use_sliding_window": True, "sliding_window": 64}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (MISTRAL, None),
        (PHI3, None),
        ({**PHI3, "sliding_window": 7}, (7, 7)),
        ({**PHI3, "sliding_window": 128}, None),
        (MIXTRAL, None),
        ({**MIXTRAL, "sliding_window": 7}, (7, 7)),
        ({**MIXTRAL, "sliding_window": 7, "layer_types": ["full_attention"] * 2}, (7, 7)),
        ({**PHI3, "sliding_window": 7, "layer_types": ["full_attention"] * 2}, (7, 7)),
        (
            {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"] * 6},
            (5,) * 6,
        ),
        ({**MISTRAL, "sliding_window": 9}, (9, 9)),
        ({**LLAMA, "architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({**QWEN2_WINDOW, "use_sliding_window": False}, None),
        (QWEN2_WINDOW, None),
        ({**QWEN2_WINDOW, "max_window_layers": 1}, (None, 64)),
        ({**QWEN2_WINDOW, "max_window_layers": 0}, (64, 64)),
        ({**QWEN2_WINDOW, "architectures": ["Qwen3ForCausalLM"], "max_window_layers": 1}, (None, 64)),
        ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 5}, (5,) * 6),
        ({**QWEN3_MOE, "use_sliding_window": False, "sliding_window": 5}, None),
        ({**QWEN2_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, (64, None)),
    ],
)
def test_windows_of_the_layers(tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, ...] | None) -> None:
    assert load_config(write(tmp_path, fields)).layer_windows == windows
