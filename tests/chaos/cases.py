"""Requests of a storm, with their expected results."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.cluster.client import AsyncClient
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.workers.models.registry import load_config
from tests.support.island import running_island
from tests.support.oracle import greedy, load_oracle, random_prompt

VOCABULARY, CASES = 512, 12


@dataclass(frozen=True)
class Case:
    """A request and its tokens and text. prompt_tokens: as many as its usage counts, with the decoder's of an encoder's
    model."""

    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int]
    text: str
    prompt_tokens: int


def make_cases(model: Path, output_tokens: int, seed: int) -> list[Case]:
    """Long prompts, shared prefixes, seeds, stop strings, log-probabilities.

    Greedy tokens are those of transformers. The others come from an island in this process, which nobody disturbs and
    which speculates on nothing.
    """
    with running_island(model, {"scheduler.max_batch_tokens": 256}) as island:
        return asyncio.run(_cases(model, island.address, output_tokens, seed))


async def _cases(model: Path, address: str, output_tokens: int, seed: int) -> list[Case]:
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer is not None
    oracle, decoder_tokens = _oracle(model), 0 if load_config(model).encoder is None else 1
    rng = random.Random(seed)
    shared = random_prompt(40, seed, VOCABULARY)
    cases = []
    async with AsyncClient(address) as client:
        for number in range(CASES):
            prompt = shared[: rng.choice((0, 16, 40))] + random_prompt(rng.randrange(1, 90), number, VOCABULARY)
            sampling: dict[str, Any] = {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
            if number % 3 == 1:
                sampling |= {"temperature": 1.0, "seed": number, "top_p": 0.9, "logprobs": 1}
            tokens = await _tokens(client, prompt, sampling)
            if sampling["temperature"] == 0:
                assert tokens == oracle(prompt, output_tokens)
            if number % 3 == 2:
                sampling["stop"] = [tokenizer.decode(tokens)[25:28]]
                tokens = await _tokens(client, prompt, sampling)
            cases.append(Case(prompt, sampling, tokens, tokenizer.decode(tokens), len(prompt) + decoder_tokens))
    return cases


def _oracle(model: Path) -> Callable[[Sequence[int], int], list[int]]:
    """Returns a function that generates with transformers from a prompt: the encoder's if there is an encoder."""
    config = load_config(model)
    if config.encoder is None:
        return partial(greedy, load_oracle(model))
    from tests.support.encoder_models import greedy_behind, load_t5gemma

    assert config.decoder_start_token_id is not None
    return partial(greedy_behind, load_t5gemma(model), start=config.decoder_start_token_id)


async def _tokens(client: AsyncClient, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    return [token async for update in client.generate(prompt, timeout=60, **sampling) for token in update.token_ids]
