"""Short prompts with a target for their first token, and a long prompt that came before them, through both servers."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.support.client_requests import GREEDY
from tests.support.http_client import COMPLETIONS, events, streaming
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.waiting import until

LONG = random_prompt(1000, 1)
SHORT = [random_prompt(20 + 3 * seed, seed) for seed in range(2, 6)]
NUM_TOKENS = 6
SETTINGS: dict[str, Any] = {"scheduler.max_batch_tokens": 8, "gateway.http_port": 0, "cache.prefix_sharing": False}
ROLES: dict[str, dict[str, Any]] = {
    "split": {},
    "colocated": {"scheduler.roles": "colocated", "scheduler.token_seconds": 0.5, "island.num_prefill": 0},
}
POLL_SECONDS = 0.002

First = tuple[float, list[int]]  # when the first token came, and all of them


def over_grpc(island: Island, prompt: list[int], **options: Any) -> First:
    with island.client() as client:
        stream = client.generate(prompt, max_tokens=NUM_TOKENS, timeout=60, **GREEDY, **options)
        tokens = list(next(stream).token_ids)
        came = time.monotonic()
        return came, tokens + [token for update in stream for token in update.token_ids]


def over_http(island: Island, prompt: list[int], **options: Any) -> First:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "return_token_ids": True, **GREEDY, **options}
    with streaming(island.http, COMPLETIONS, **body) as lines:
        parts = events(lines)
        tokens = next(parts)["choices"][0]["token_ids"]
        came = time.monotonic()
        return came, tokens + [token for part in parts for token in part["choices"][0]["token_ids"]]


@contextmanager
def held(island: Island, prompts: int) -> Iterator[None]:
    """Stops the worker that computes prompts at a prompt's first chunk, until so many prompts are there."""
    loop = island.workers[0]._loop
    assert loop is not None
    scheduler = loop.scheduler

    def step(go_on: Callable[[], float | None]) -> float | None:
        there = scheduler.num_running + scheduler.num_waiting
        if not all_there and there < prompts and any(one.computed for one in tuple(scheduler._running)):
            return POLL_SECONDS
        if there >= prompts:
            all_there.append(True)
        return go_on()

    all_there: list[bool] = []
    loop.step = partial(step, loop.step)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del loop.step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "model"
    make_checkpoint(folder, arch="qwen3", size="tiny", seed=1)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    oracle = load_oracle(folder)
    return [greedy(oracle, prompt, NUM_TOKENS) for prompt in (LONG, *SHORT)]


@pytest.fixture(scope="module", params=ROLES)
def island(request: pytest.FixtureRequest, folder: Path) -> Iterator[Island]:
    with running_island(folder, SETTINGS | ROLES[request.param]) as island:
        yield island


def ask_all(island: Island, target: dict[str, float]) -> list[First]:
    """Asks for the long prompt, and then for the short ones, by turns over gRPC and HTTP. target: of the short ones."""
    scheduler = island.workers[0]._loop.scheduler  # type: ignore[union-attr]
    with held(island, 1 + len(SHORT)), ThreadPoolExecutor(1 + len(SHORT)) as pool:
        asked = [pool.submit(over_grpc, island, LONG)]
        until(lambda: asked[0].done() or any(one.computed for one in tuple(scheduler._running)))
        for number, prompt in enumerate(SHORT):
            asked.append(pool.submit((over_grpc, over_http)[number % 2], island, prompt, **target))
        return [one.result(60) for one in asked]


def test_short_prompts_with_a_target_pass_a_long_one(island: Island, expected: list[list[int]]) -> None:
    (long, long_tokens), *short = ask_all(island, {"first_token_seconds": 50.0})
    assert [long_tokens, *(tokens for _, tokens in short)] == expected
    assert max(came for came, _ in short) < long


def test_without_a_target_they_wait_for_it(island: Island, expected: list[list[int]]) -> None:
    (long, long_tokens), *short = ask_all(island, {})
    assert [long_tokens, *(tokens for _, tokens in short)] == expected
    assert max(came for came, _ in short) > long
