"""What is told of a checkpoint without torch agrees with what loading it would say."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.tools.architectures import ARCHITECTURES, SIZES
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint.architectures import related
from tandem.workers.checkpoint.errors import InvalidConfig, InvalidWeights, ModelError, NotFetched, UnknownArchitecture
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


@pytest.mark.parametrize(
    ("names", "kin"),
    [
        ("FalconForCausalLM", []),
        ("MambaForCausalLM", []),
        ("OPTForCausalLM", []),
        ("GPT2LMHeadModel", []),
        ("Gemma3nForConditionalGeneration", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM"]),
        ("Phi3SmallForCausalLM", ["Phi3ForCausalLM"]),
        ("MistralModel", ["MistralForCausalLM"]),
    ],
)
def test_related_families_are_named_and_no_others(tmp_path: Path, names: str, kin: list[str]) -> None:
    assert related(names)[:3] == kin[:3]
    change(tmp_path, architectures=[names])
    words = f"related ones are served: {kin[0]}" if kin else "nor is one related to it"
    with pytest.raises(UnknownArchitecture, match=f"architecture {names} is not served.*{words}"):
        first_checks(tmp_path, has_weights=False)
    change(tmp_path, architectures=[])
    with pytest.raises(InvalidConfig, match="architectures is \\[\\]; it must be a list with one of Deepseek"):
        first_checks(tmp_path, has_weights=False)


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
        first_checks(tmp_path, has_weights=True)
    with pytest.raises(ModelError) as late:
        load_config(tmp_path)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize("section", [{"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}])
def test_served_quantizations_pass(tmp_path: Path, section: dict[str, object]) -> None:
    change(tmp_path, quantization_config={**section, "group_size": 16})
    assert load_config(tmp_path).quantization.weights == "awq"
    first_checks(tmp_path, has_weights=True)


def test_files_that_are_cut_short_and_layers_that_are_missing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, arch="llama", seed=1)
    change(tmp_path, num_hidden_layers=3)
    with pytest.raises(InvalidWeights, match=r"num_hidden_layers is 3 in config\.json; the weights have 2 layers"):
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
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)  # which loading has an error for
    first_checks(tmp_path, has_weights=True)
