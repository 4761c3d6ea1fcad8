from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.cluster.cli.random_checkpoint import ARCHITECTURES, SIZES, make_checkpoint
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.workers.checkpoint.errors import InvalidConfig
from tandem.workers.models.weights import INDEX, load_decoder
from tests.workers.reference_attention import ReferenceAttention, Sequence


def load_oracle(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_transformers_loads_it_and_agrees(tmp_path: Path, arch: str) -> None:
    config = make_checkpoint(tmp_path, arch, "tiny", dtype="float32")
    model, report = load_oracle(tmp_path, output_loading_info=True)
    assert not any(report.values())
    prompt = AutoTokenizer.from_pretrained(tmp_path)("The river", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = model(prompt).logits[0]
        attention = ReferenceAttention(config)
        attention.batch = [(Sequence(prompt.shape[1]), prompt.shape[1])]
        logits = load_decoder(tmp_path, config).forward(prompt[0], attention, torch.arange(prompt.shape[1]))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_greedy_output_is_varied_words(tmp_path: Path, size: str) -> None:
    make_checkpoint(tmp_path, "llama", size)
    model, tokenizer = load_oracle(tmp_path), Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None
    prompt = torch.tensor([tokenizer.encode("Hello there")])
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=48, do_sample=False)[0, prompt.shape[1] :]
    assert len(output) == 48
    assert len(set(output.tolist())) >= 16
    assert all(word.isalpha() for word in tokenizer.decode(output.tolist()).split())


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        make_checkpoint(folder, "qwen3", "tiny", seed=seed)
    first, second, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_shards_load_in_transformers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral", "tiny", dtype="bfloat16", shard_bytes=50_000)
    assert (tmp_path / INDEX).exists()
    assert load_oracle(tmp_path, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["arch", "size", "dtype"])
def test_an_unknown_choice_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} is 'huge'; it must be one of "):
        make_checkpoint(tmp_path, **{name: "huge"})  # type: ignore[arg-type]  # the names are those of str arguments
