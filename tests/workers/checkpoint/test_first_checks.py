"""Checks that what is said of a checkpoint without torch agrees with what loading it would say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.tools.architectures import ARCHITECTURES, SIZES, config_fields
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint.architectures import read_architecture
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidWeights, ModelError, NotFetched, UnknownArchitecture
from tandem.workers.checkpoint.fields import Fields
from tandem.workers.checkpoint.first_checks import first_checks
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import check_weights

LLAMA: dict[str, Any] = {**SIZES["tiny"], **ARCHITECTURES["llama"]}


def change(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    before = json.loads(path.read_text()) if path.exists() else LLAMA
    path.write_text(json.dumps({**before, **fields}))


@pytest.mark.gate("llama", "gemma4", "t5gemma", "deepseek_v3")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_good_checkpoints_pass(tmp_path: Path, arch: str) -> None:
    make_checkpoint(tmp_path, arch=arch, seed=1)
    longest = first_checks(tmp_path, has_weights=True)
    assert longest in (None, load_config(tmp_path).max_length)
    if arch == "llama":
        assert longest == 2048


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, 2048),
        ({"rope_type": "yarn", "factor": 8.0}, None),
        ({"type": "linear", "factor": 2.0}, None),
        ({"full_attention": {"rope_type": "yarn"}}, None),
    ],
)
def test_the_length_is_told_where_it_is_plain(tmp_path: Path, rope: dict[str, object], longest: int | None) -> None:
    change(tmp_path, rope_scaling=rope)
    assert first_checks(tmp_path, has_weights=False) == longest


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_pointers_of_git_lfs_are_told(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, arch="llama", seed=1)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5516032\n")
    told = rf"{name} is a Git LFS pointer, not the file; `git lfs pull` in {tmp_path} fetches it"
    with pytest.raises(NotFetched, match=told):
        first_checks(tmp_path, has_weights=True)
    with pytest.raises(NotFetched, match=told):
        check_weights(tmp_path, load_config(tmp_path))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    change(tmp_path, architectures=["FalconForCausalLM"])
    with pytest.raises(UnknownArchitecture, match=r"architecture FalconForCausalLM is not served\. Served: Deepseek"):
        first_checks(tmp_path, has_weights=False)
    change(tmp_path, architectures=[])
    with pytest.raises(InvalidConfig, match="architectures is \\[\\]; it must be a list with one of Deepseek"):
        first_checks(tmp_path, has_weights=False)


BROKEN: list[dict[str, object]] = [
    {"hidden_act": "relu6"},
    {"num_key_value_heads": 3},
    {"num_attention_heads": "x"},
    {"rope_scaling": {"rope_type": "ntk"}},
    {"rope_parameters": {"rope_type": "ntk"}},
    {"intermediate_size": None},
    {"hidden_size": 0},
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_refused_fields_are_those_that_loading_refuses(tmp_path: Path, arch: str, broken: dict[str, object]) -> None:
    """In families like Llama all such fields are refused early."""
    (tmp_path / "config.json").write_text(json.dumps({**config_fields(arch, "tiny", "float32"), **broken}))
    early, late = (
        said(first_checks, tmp_path, has_weights=False),
        said(load_config, tmp_path),
    )
    assert late or not early
    if arch in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "deepseek_v3"):
        assert early == late
        assert early


def said(check: Callable[..., object], *arguments: object, **options: object) -> str:
    """Returns the text of an error; empty without one."""
    try:
        check(*arguments, **options)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": ["awq"]},
        {"quant_method": "awq", "bits": 8, "zero_point": True, "version": "gemm", "group_size": 128},
        {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemv", "group_size": 128},
        {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": 128},
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
    ],
)
def test_refused_quantizations_are_those_that_loading_refuses(tmp_path: Path, section: dict[str, object]) -> None:
    change(tmp_path, quantization_config=section)
    with pytest.raises(ModelError) as early:
        first_checks(tmp_path, has_weights=False)
    with pytest.raises(ModelError) as late:
        load_config(tmp_path)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("section", [{"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}])
def test_served_quantizations_pass(tmp_path: Path, section: dict[str, object]) -> None:
    change(tmp_path, quantization_config={**section, "group_size": 16})
    assert load_config(tmp_path).quantization.weights == "awq"
    first_checks(tmp_path, has_weights=False)


def test_files_that_are_cut_short_and_layers_that_are_missing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, arch="llama", seed=1)
    change(tmp_path, num_hidden_layers=3)
    with pytest.raises(InvalidWeights, match=r"num_hidden_layers is 3 in config\.json; the weights have 2 layers"):
        first_checks(tmp_path, has_weights=True)
    change(tmp_path, num_hidden_layers=1)
    with pytest.raises(InvalidWeights, match=r"num_hidden_layers is 1 in config\.json; the weights have 2 layers"):
        first_checks(tmp_path, has_weights=True)
    change(tmp_path, num_hidden_layers=2)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError) as early:
        first_checks(tmp_path, has_weights=True)
    with pytest.raises(ModelError) as late:
        check_weights(tmp_path, load_config(tmp_path))
    assert str(early.value) == str(late.value)


def test_weights_of_another_model_are_noticed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, arch="llama", seed=1)
    change(tmp_path, hidden_size=128, tie_word_embeddings=True)
    with pytest.raises(ModelError) as early:
        first_checks(tmp_path, has_weights=True)
    asked = "tensor model.embed_tokens.weight has shape [512, 64]; config.json asks for [512, 128]"
    assert str(early.value) == f"{tmp_path / 'model.safetensors'}: {asked}"
    with pytest.raises(ModelError, match=r"has shape \[512, 64\]; config.json asks for \[512, 128\]"):
        check_weights(tmp_path, load_config(tmp_path))
    first_checks(tmp_path, has_weights=False)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    early = said(first_checks, tmp_path, has_weights=True)
    assert early == said(check_weights, tmp_path, load_config(tmp_path))
    assert "is cut short or no safetensors file: 20 bytes, and a header of" in early


@pytest.mark.parametrize(
    ("fields", "tensor", "found", "asked"),
    [
        ({"intermediate_size": 177}, "mlp.gate_proj", [176, 64], [177, 64]),
        ({"num_key_value_heads": 1, "head_dim": 16}, "self_attn.k_proj", [32, 64], [16, 64]),
        ({"num_attention_heads": 8, "head_dim": 16}, "self_attn.q_proj", [64, 64], [128, 64]),
    ],
)
def test_layers_of_another_model_are_noticed(
    tmp_path: Path, fields: dict[str, object], tensor: str, found: list[int], asked: list[int]
) -> None:
    make_checkpoint(tmp_path, arch="llama", seed=1)
    change(tmp_path, **fields)
    words = f"tensor model.layers.0.{tensor}.weight has shape {found}; config.json asks for {asked}"
    assert words in said(first_checks, tmp_path, has_weights=True)
    assert "; config.json asks for [" in said(check_weights, tmp_path, load_config(tmp_path))
    assert not said(first_checks, tmp_path, has_weights=False)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, arch="llama", seed=1)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    early, late = said(first_checks, tmp_path, has_weights=True), said(check_weights, tmp_path, load_config(tmp_path))
    assert early == late
    assert "lacks model-1.safetensors, model-2.safetensors, of 2 files that model.safetensors.index.json" in early


@pytest.mark.parametrize("name", ["MistralModel", "Qwen3Model"])
def test_models_without_a_head_are_of_their_family(name: str) -> None:
    assert read_architecture(Fields({"architectures": [name]}, "x")) == name.removesuffix("Model") + "ForCausalLM"
