"""Logits with NaN end their own request, typed, in plain steps and in graph buffers; the others of its batch go on."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor, nan

from tandem.cluster.client import AsyncClient
from tandem.cluster.errors import NotFinite
from tandem.workers import worker
from tandem.workers.runner.model_cache import make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt

PROMPTS = [random_prompt(9 + number, seed=number) for number in range(5)]
OUTPUT, AT = 12, 6


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return [greedy(load_oracle(folder), prompt, OUTPUT) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def broken(folder: Path, expected: list[list[int]]) -> int:
    """Returns the token that the first prompt's answer has at AT. Its embedding is NaN from now on."""
    token, path = expected[0][AT], folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][token] = nan
    save_file(tensors, path, {"format": "pt"})
    return token


@pytest.fixture(params=["plain", "graphs"])
def island(folder: Path, broken: int, request: pytest.FixtureRequest) -> Iterator[Island]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "graphs":
            steps, prompts = ModelRunner.capture_steps, ModelRunner.capture_prompts
            patch.setattr(worker, "make_cache", partial(make_cache, kernels=TableKernels))
            patch.setattr(ModelRunner, "capture_steps", lambda runner, count: steps(runner, count, rerun))
            patch.setattr(ModelRunner, "capture_prompts", lambda runner, count: prompts(runner, count, rerun))
        with running_island(folder, {"scheduler.max_sequences": 12}) as island:
            yield island


def rerun(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return compute


Answer = tuple[list[int], str | None]
"""The tokens of a request, and why it failed."""


async def answers(address: str, prompts: Sequence[Sequence[int]], logprobs: int = 0) -> list[Answer]:
    """Returns the answers to requests sent at once."""

    async def one(client: AsyncClient, prompt: Sequence[int]) -> Answer:
        tokens: list[int] = []
        try:
            async for update in client.generate(prompt, timeout=60, max_tokens=OUTPUT, logprobs=logprobs, **GREEDY):
                tokens += update.token_ids
        except NotFinite as error:
            return tokens, str(error)
        return tokens, None

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(one(client, prompt) for prompt in prompts))


@pytest.mark.parametrize("logprobs", [0, 2])
def test_a_request_ends_where_its_logits_are_not_finite(
    island: Island, expected: list[list[int]], broken: int, logprobs: int
) -> None:
    sound = [number for number, answer in enumerate(expected) if broken not in [*answer[:-1], *PROMPTS[number]]]
    assert sound
    prompts = [PROMPTS[0], [3, 4, broken, 5, 6], *(PROMPTS[number] for number in sound)]
    (begun, first), (nothing, second), *others = asyncio.run(answers(island.address, prompts, logprobs))
    assert begun == expected[0][: min(len(begun), AT + 1)]  # the error may overtake tokens
    assert f"logits are not finite at token {len(PROMPTS[0]) + AT + 1} of request" in str(first)
    assert not nothing
    assert "logits are not finite at token 5 of request" in str(second)
    assert others == [(expected[number], None) for number in sound]
