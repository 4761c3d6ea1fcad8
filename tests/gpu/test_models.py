"""Tiny checkpoints through ModelRunner and the paged cache on a GPU, against transformers on the same GPU."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.cached_model import CachedModel
from tests.support.checkpoints import CHOOSE_POSITIONS, FAMILIES, make_model, sizes_on_gpu
from tests.support.oracle import greedy, in_its_precision, load_oracle, random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
ERROR_RATIO = 1.5  # the error of logits, ours to that of transformers in the same precision
MIXED_STEPS = ({0: 60, 1: 33}, {0: 1, 1: 7, 2: 50}, {0: 1, 1: 1, 2: 1}, {2: 20, 0: 1}, *[{0: 1, 1: 1, 2: 1}] * 9)
PROMPTS = {0: random_prompt(45, seed=1), 1: random_prompt(9, seed=2), 2: random_prompt(70, seed=3)}
CHUNK = 32


def load(folder: Path, dtype: str) -> CachedModel:
    model = CachedModel(folder, dtype, "cuda")
    for sequence in PROMPTS:
        model.cache.add_sequence(sequence)
    return model


def chunks(prompts: dict[int, list[int]]) -> list[dict[int, list[int]]]:
    """Prompts that end together, so that chunks of several and single tokens share forwards."""
    longest = max(len(prompt) for prompt in prompts.values())
    steps = []
    for end in range(CHUNK, longest + CHUNK, CHUNK):
        window = {s: p[max(0, end - CHUNK) : end] for s, p in prompts.items()}
        steps.append({sequence: part for sequence, part in window.items() if part})
    return steps


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    make_model(family).save_pretrained(tmp_path)
    oracle = load_oracle(tmp_path, device="cuda")
    model = load(tmp_path, "float32")
    expected = {sequence: greedy(oracle, prompt, 24) for sequence, prompt in PROMPTS.items()}
    tokens: dict[int, list[int]] = {}
    for step in chunks(PROMPTS):
        sampled = model.sample(model.step(step))
        tokens |= {sequence: [token] for sequence, token in zip(step, sampled, strict=True)}
    for _ in range(23):
        sampled = model.sample(model.step({sequence: [made[-1]] for sequence, made in tokens.items()}))
        for made, token in zip(tokens.values(), sampled, strict=True):
            made.append(token)
    assert tokens == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", [*FAMILIES, "phi3-head-dim"])
def test_half_precision_logits_are_as_near_to_float32_as_those_of_transformers(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """FlashInfer's chunks and decodes, mixed, along given tokens.

    Compares medians over tokens, because a rounding that flips a choice of experts moves a token far. If it also flips
    choices of positions, that happens to most tokens. Then the tenth that moves least is compared.
    """
    make_model(family, **sizes_on_gpu(family)).save_pretrained(tmp_path)
    given = {sequence: random_prompt(100, seed=sequence) for sequence in PROMPTS}
    model, done = load(tmp_path, dtype), dict.fromkeys(given, 0)
    rows: list[tuple[int, int]] = []
    decoded: list[bool] = []
    logits: list[Tensor] = []
    for lengths in MIXED_STEPS:
        tokens = {s: given[s][done[s] : done[s] + length] for s, length in lengths.items()}
        logits.append(model.step(tokens, all_rows=True))
        for sequence, length in lengths.items():
            rows += [(sequence, done[sequence] + index) for index in range(length)]
            decoded += [length == 1] * length
            done[sequence] += length
    exact = transformers_logits(tmp_path, torch.float32, given, rows)
    theirs = (transformers_logits(tmp_path, getattr(torch, dtype), given, rows) - exact).abs().mean(1)
    ours = (torch.cat(logits) - exact).abs().mean(1)
    singles = torch.tensor(decoded, device=ours.device)
    part = 0.1 if family in CHOOSE_POSITIONS else 0.5
    for kind in (singles, ~singles):
        assert float(ours[kind].quantile(part)) < ERROR_RATIO * float(theirs[kind].quantile(part))


@torch.inference_mode()
def transformers_logits(
    folder: Path, dtype: torch.dtype, given: dict[int, list[int]], rows: list[tuple[int, int]]
) -> Tensor:
    """Float32 [n, vocab]: those after the tokens named by rows, (sequence, position) each."""
    model = load_oracle(folder, dtype, "cuda")
    with in_its_precision(model):
        whole = {s: model(torch.tensor([tokens], device="cuda")).logits[0].float() for s, tokens in given.items()}
    return torch.stack([whole[sequence][position] for sequence, position in rows])
