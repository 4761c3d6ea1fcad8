from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.cluster.text.tokenizer import Tokenizer
from tandem.cluster.tools.architectures import ARCHITECTURES, HALVES, MTP_FIELDS, SIZES
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.checkpoint.errors import InvalidConfig
from tandem.workers.checkpoint.weight_files import INDEX
from tandem.workers.config import SpeculationSettings
from tandem.workers.models.drafters.load import check_drafter_weights
from tandem.workers.models.drafters.mtp import mtp_config
from tandem.workers.models.weights import load_decoder
from tests.support.encoder_models import EncoderRunner
from tests.workers.reference_attention import ReferenceAttention, Sequence

MTP = SpeculationSettings("mtp")


def load_oracle(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.long
@pytest.mark.parametrize("arch", HALVES)
def test_transformers_loads_a_model_of_two_halves_and_agrees(tmp_path: Path, arch: str) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    config = make_checkpoint(tmp_path, arch, "tiny", dtype="float32")
    model, report = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    encoder = AutoTokenizer.from_pretrained(tmp_path)("The river", return_tensors="pt")["input_ids"]
    decoder = torch.tensor([[config.decoder_start_token_id, 300, 301]])
    masks = {"attention_mask": torch.ones_like(encoder), "decoder_attention_mask": torch.ones_like(decoder)}
    with torch.inference_mode():
        expected = model.eval()(input_ids=encoder, decoder_input_ids=decoder, **masks).logits[0, -1]
    (logits,) = EncoderRunner(tmp_path).prefill([(encoder[0].tolist(), decoder[0].tolist())])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in HALVES])
def test_transformers_loads_it_and_agrees(tmp_path: Path, arch: str) -> None:
    from transformers import AutoTokenizer

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


def test_a_layer_that_drafts_is_beside_what_transformers_loads(tmp_path: Path) -> None:
    """The layer alone is what it does not know."""
    config = make_checkpoint(tmp_path, "qwen3_5_moe", mtp=True)
    _, report = load_oracle(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert check_drafter_weights(tmp_path, MTP, config, mtp_config(config)) is None
    with pytest.raises(
        InvalidConfig, match=f"mtp is given with arch 'llama'; arch must be one of {', '.join(MTP_FIELDS)}"
    ):
        make_checkpoint(tmp_path, mtp=True)


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
