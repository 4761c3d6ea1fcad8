"""Verify steps that follow one another in the loop of a decode worker, with a real model, against plain steps."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tandem.workers.config import SpeculationSettings
from tandem.workers.sampling.sampling_params import SamplingParams
from tests.cache.table_kernels import TableKernels
from tests.support.oracle import load_oracle, random_prompt
from tests.support.prompt_programs import RunInOnePlace
from tests.support.prompt_specs import spec_of
from tests.workers.loop_pair import DECODE, NO_SPECULATION, LoopPair

OUTPUT = 40
NOISE = 0.1  # of a drafter's parameters, in their standard deviations
NUM_PAGES = 120


def pair_of(folder: Path, speculation: SpeculationSettings, *, sharing: bool) -> tuple[LoopPair, list[bool]]:
    """Returns a pair, and a list that gets, for each verify step that the decode worker launches, whether it
    follows."""
    pair = LoopPair(folder, num_pages=NUM_PAGES, speculation=speculation, kernels=TableKernels, sharing=sharing)
    runner, launched = pair.runners[DECODE], list[bool]()
    runner.capture_steps(8, RunInOnePlace())
    if speculation.tokens:
        ngram = speculation.max_ngram if speculation.method == "ngram" else 0
        runner.capture_verification(speculation.max_step_tokens, RunInOnePlace(), ngram)
        runner.capture_drafts(8, speculation.tokens, RunInOnePlace())
        own: Callable[..., Any] = runner.verify

        def verify(*arguments: Any, follows: bool = False) -> Any:
            launched.append(follows)
            return own(*arguments, follows=follows)

        cast(Any, runner).verify = verify
    return pair, launched


def requests_of(seed: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts that repeat themselves; parameters of all kinds."""
    draws = random.Random(seed)
    made = {}
    for number in range(5):
        prompt = random_prompt(draws.randint(2, 9), 10 * seed + number) * draws.randint(2, 3)
        params = SamplingParams(
            max_tokens=draws.randint(2, OUTPUT),
            temperature=draws.choice([0, 0, 0.4]),
            seed=draws.randrange(1 << 60),
            logprobs=draws.choice([None, None, 2]),
            presence_penalty=draws.choice([0.0, 0.0, 0.0, 1.0]) if seed % 3 == 0 else 0.0,
            ignore_eos=True,
        )
        made[f"r{number}"] = prompt, params
    return made


def tokens_of(pair: LoopPair, seed: int) -> dict[str, list[int]]:
    """Requests come while others are decoded; one stops among its tokens, as in another run."""
    draws = random.Random(seed)
    requests = requests_of(seed)
    for request_id, (prompt, params) in requests.items():
        reservation = pair.prepare(request_id, prompt, params.max_tokens)
        pair.prefill.submit(request_id, spec_of(prompt), params, reservation)
        pair.start(request_id, reservation, params.max_tokens, params)
        pair.run_prefill()
        for _ in range(draws.randint(0, 6)):
            pair.step_decode()
    pair.run_decode()
    found = {request_id: pair.tokens(request_id) for request_id in requests}
    prompt, params = requests["r0"]
    stopped = replace(params, stop_token_ids=tuple(found["r0"][len(found["r0"]) // 2 :][:1]), ignore_eos=False)
    found["stopped"] = pair.finish("stopped", prompt, pair.prepare("stopped", prompt, OUTPUT), OUTPUT, stopped)
    return found


def nearly(folder: Path, target: Path) -> SpeculationSettings:
    """A draft model whose tokens often equal the target's."""
    model, draws = load_oracle(target), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += NOISE * tensor.std(correction=0) * torch.randn(tensor.shape, generator=draws)
    model.save_pretrained(folder)
    return SpeculationSettings("draft_model", 4, 24, draft=str(folder))


@pytest.mark.gate("ngram-True")
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_tokens_are_those_of_plain_steps(folder: Path, method: str, sharing: bool, tmp_path: Path) -> None:
    speculation = SpeculationSettings("ngram", 4, 24, 2) if method == "ngram" else nearly(tmp_path, folder)
    followed = waited = accepted = drafted = 0
    for seed in range(6):
        plain, _ = pair_of(folder, NO_SPECULATION, sharing=sharing)
        ours, launched = pair_of(folder, speculation, sharing=sharing)
        assert tokens_of(ours, seed) == tokens_of(plain, seed)
        if not sharing:
            ours.assert_free()
        followed, waited = followed + sum(launched), waited + launched.count(False)
        accepted += ours.decode_counters.accepted_tokens
        drafted += ours.decode_counters.drafted_tokens
    assert min(followed, waited, accepted, drafted - accepted) > 10
