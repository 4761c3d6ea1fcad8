"""DenseDecoder's logits against transformers: every family and config feature, in float32 and bfloat16, and chunks."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tandem.workers.models.decoder import DenseDecoder
from tandem.workers.models.registry import load_config
from tandem.workers.models.weights import load_decoder
from tests.support.checkpoints import CASES, save_checkpoint
from tests.support.oracle import load_oracle, random_prompt
from tests.workers.reference_attention import ReferenceAttention, Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FLOAT32 = 1e-4  # relative and absolute
ERROR_RATIO = 1.5  # the mean error of logits in bfloat16, ours to that of transformers


@pytest.fixture(scope="session", params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def oracle(folder: Path) -> "PreTrainedModel":
    return load_oracle(folder)


def load(folder: Path, dtype: str = "auto") -> tuple[DenseDecoder, ReferenceAttention]:
    config = load_config(folder, dtype)
    return load_decoder(folder, config), ReferenceAttention(config)


@torch.inference_mode()
def forward(
    decoder: DenseDecoder, attention: ReferenceAttention, batch: list[tuple[Sequence, list[int]]], rows: list[int]
) -> torch.Tensor:
    attention.batch = [(sequence, len(tokens)) for sequence, tokens in batch]
    token_ids = torch.tensor([token for _, tokens in batch for token in tokens])
    return decoder.forward(token_ids, attention, torch.tensor(rows, dtype=torch.int64))


def test_logits_equal_transformers(folder: Path, oracle: "PreTrainedModel") -> None:
    decoder, attention = load(folder)
    prompt = random_prompt(50, 0)
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    logits = forward(decoder, attention, [(Sequence(50), prompt)], list(range(50)))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.gate("[!d]*", "deepseek_v[23]*")
def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(
    folder: Path, oracle: "PreTrainedModel"
) -> None:
    """The mean, for a router's choice between two like experts may flip with any rounding. So may an index's between
    positions, on which all later layers depend: there the mean over some prompts."""
    decoder, attention = load(folder, "bfloat16")
    rounded, ours, theirs = load_oracle(folder, torch.bfloat16), 0.0, 0.0
    latent = decoder.config.latent
    chooses = decoder.config.compressed is not None or (latent is not None and latent.index is not None)
    for seed in range(4 if chooses else 1):
        prompt = random_prompt(50, seed)
        with torch.inference_mode():
            exact, other = (model(torch.tensor([prompt])).logits[0].float() for model in (oracle, rounded))
        logits = forward(decoder, attention, [(Sequence(50), prompt)], list(range(50)))
        ours, theirs = ours + float((logits - exact).abs().mean()), theirs + float((other - exact).abs().mean())
    assert ours < ERROR_RATIO * theirs


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("llama", tmp_path_factory.mktemp("plain"))


def test_chunks_give_the_logits_of_the_whole(plain: Path) -> None:
    decoder, attention = load(plain)
    prompt = random_prompt(40, 0)
    whole = forward(decoder, attention, [(Sequence(40), prompt)], [39])
    chunked = Sequence(40)
    for begin, end in ((0, 13), (13, 14), (14, 33)):
        assert forward(decoder, attention, [(chunked, prompt[begin:end])], []).shape == (0, 199)
    torch.testing.assert_close(
        forward(decoder, attention, [(chunked, prompt[33:])], [6]), whole, rtol=FLOAT32, atol=FLOAT32
    )


def test_only_asked_rows_in_asked_order(plain: Path) -> None:
    decoder, attention = load(plain)
    prompt = random_prompt(9, 0)
    every = forward(decoder, attention, [(Sequence(9), prompt)], list(range(9)))
    some = forward(decoder, attention, [(Sequence(9), prompt)], [7, 2])
    torch.testing.assert_close(some, every[[7, 2]], rtol=FLOAT32, atol=FLOAT32)
