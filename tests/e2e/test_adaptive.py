"""Adaptive roles through the gateway: no choice of workers, and no move, changes a token."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.cluster.client import Client
from tandem.cluster.routing.policy import Ask, Pair, WorkerLoad
from tandem.workers import worker
from tandem.workers.config import Role
from tandem.workers.runner.model_cache import make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.island import Island, running_island
from tests.support.moves import move_back_and_forth
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.sliding_oracle import slide_greedily
from tests.support.tvm_cache import TvmCache

FAMILIES = ["qwen3", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe"]
ADAPTIVE = {"scheduler.roles": "adaptive", "scheduler.token_seconds": 0.02, "scheduler.max_sequences": 12}
PROMPTS = [random_prompt(3 + 11 * number, seed=number) for number in range(12)]  # the longest in three chunks
NUM_TOKENS = 12

Choose = Callable[[Sequence[WorkerLoad]], tuple[WorkerLoad, WorkerLoad]]


def of_role(workers: Sequence[WorkerLoad], role: Role) -> WorkerLoad:
    return next(one for one in workers if one.role == role)


def anyhow(seed: int) -> Choose:
    chance = random.Random(seed)
    return lambda workers: (chance.choice(workers), chance.choice(workers))


CHOICES: dict[str, Choose] = {
    "local": lambda workers: (of_role(workers, Role.DECODE), of_role(workers, Role.DECODE)),
    "kept": lambda workers: (of_role(workers, Role.PREFILL), of_role(workers, Role.PREFILL)),
    "crossed": lambda workers: (of_role(workers, Role.PREFILL), of_role(workers, Role.DECODE)),
    "anyhow": anyhow(1),
}


@contextmanager
def choosing(island: Island, choose: Choose) -> Iterator[None]:
    """Makes the gateway take these pairs first, and the policy's pairs if these have no room."""
    islands = island.gateway._islands
    before = islands._policy

    def policy(workers: Sequence[WorkerLoad], ask: Ask, turn: int) -> Iterator[Pair]:
        return chain([Pair(*choose(workers))], before(workers, ask, turn))

    islands._policy = policy
    yield
    islands._policy = before


@contextmanager
def adaptive_island(folder: Path, **overrides: Any) -> Iterator[Island]:
    with running_island(folder, ADAPTIVE | overrides) as island:
        yield island
        for one in island.workers:
            assert TvmCache.of(one.cache).is_empty
            assert one.cache.pages.free == one.cache.pages.total


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    oracle = load_oracle(folder)
    return [greedy(oracle, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.gate("qwen3", "gemma3")
def test_tokens_equal_transformers_whoever_serves(folder: Path, expected: list[list[int]]) -> None:
    """All prompts come twice, so that the second time prefixes are found on any worker."""
    with adaptive_island(folder) as island:
        for choose in CHOICES.values():
            with choosing(island, choose):
                for _ in range(2):
                    assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == expected
        assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == expected


@pytest.mark.gate("qwen3-*", "gemma3-one worker")
@pytest.mark.parametrize("num_prefill", [0, 1], ids=["one worker", "1P1D"])
def test_colocated_workers_serve_their_own_requests(folder: Path, expected: list[list[int]], num_prefill: int) -> None:
    """All prompts come twice, so that the second time prefixes are found."""
    with adaptive_island(folder, **{"scheduler.roles": "colocated", "island.num_prefill": num_prefill}) as island:
        assert len(island.workers) == num_prefill + 1
        for _ in range(2):
            assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == expected
        with Client(island.address) as client:
            counters = [one.counters for one in client.cluster_info().islands[0].workers]
        assert all(one.decoded_tokens and one.prompt_tokens and not one.pushes for one in counters)


def rerun(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return compute


@pytest.fixture
def in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes steps overlap, with steps and prompts in graph buffers, as on a GPU."""
    for name in ("capture_steps", "capture_prompts", "capture_steps_with_prompts"):
        capture = getattr(ModelRunner, name)
        monkeypatch.setattr(
            ModelRunner, name, lambda runner, *limits, capture=capture: capture(runner, *limits, capture=rerun)
        )
    monkeypatch.setattr(worker, "make_cache", partial(make_cache, kernels=TableKernels))


@pytest.mark.gate("qwen3")
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.usefixtures("in_graphs")
def test_steps_with_prompts_in_graphs_give_the_same_tokens(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path)
    oracle = load_oracle(folder)
    expected = [greedy(oracle, prompt, NUM_TOKENS) for prompt in PROMPTS]
    with adaptive_island(folder) as island:
        for choose in CHOICES.values():
            with choosing(island, choose):
                assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == expected


@pytest.mark.gate("qwen3")
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek_v3"])
def test_requests_slide_whoever_serves(family: str, tmp_path: Path) -> None:
    """A prompt may begin with a prefix that the decoding worker has; no request moves."""
    folder, sliding, prompts = save_checkpoint(family, tmp_path), {"window": 30, "sinks": 4}, PROMPTS[:5]
    oracle = load_oracle(folder)
    expected = [slide_greedily(oracle, prompt, 60, **sliding) for prompt in prompts]
    with adaptive_island(folder) as island:
        for choose in (CHOICES["local"], CHOICES["crossed"], CHOICES["local"]):
            with choosing(island, choose):
                assert complete_all(island.address, prompts, max_tokens=60, sliding=sliding, **GREEDY) == expected


def test_a_lone_token_log_probabilities_and_stops(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3", tmp_path)
    prompt = PROMPTS[5]
    with adaptive_island(folder) as island:
        split = complete(island.address, prompt, max_tokens=6, logprobs=2, temperature=0.8, seed=3)
        with choosing(island, CHOICES["local"]):
            answers = [
                complete(island.address, prompt, max_tokens=6, logprobs=2, temperature=0.8, seed=3) for _ in range(2)
            ]
            for local in answers:
                assert tokens_of(local) == tokens_of(split)
                assert len([one for update in local for one in update.logprobs]) == 6
            last = answers[-1][-1]
            assert last.usage is not None
            assert last.usage.cached_tokens == len(prompt) // 8 * 8
            assert last.timings is not None
            assert 0 < last.timings.prefill_seconds <= last.timings.total_seconds
            assert last.timings.bytes_pushed == 0
            tokens = tokens_of(split)
            assert tokens_of(complete(island.address, prompt, max_tokens=1, temperature=0.8, seed=3)) == tokens[:1]
            stopped = complete(
                island.address, prompt, max_tokens=6, temperature=0.8, seed=3, stop_token_ids=[tokens[0]]
            )
            assert tokens_of(stopped) == tokens[:1]
            assert stopped[-1].finish_reason == "stop"


@pytest.fixture(scope="module")
def long_answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Makes a checkpoint, and its answers of 120 tokens to some prompts."""
    folder = save_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    oracle = load_oracle(folder)
    return folder, [greedy(oracle, prompt, 120) for prompt in PROMPTS[:6]]


@pytest.mark.gate("False")
@pytest.mark.parametrize("sharing", [True, False])
def test_requests_that_move_lose_no_token(
    long_answers: tuple[Path, list[list[int]]], sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests move back and forth, from wherever they are decoded, while others are."""
    folder, expected = long_answers
    prompts, num_tokens = PROMPTS[: len(expected)], len(expected[0])
    move_back_and_forth(len(prompts), monkeypatch)
    with adaptive_island(folder, **{"cache.prefix_sharing": sharing}) as island:
        with ThreadPoolExecutor(len(prompts)) as pool:
            ran = list(pool.map(lambda one: complete(island.address, one, max_tokens=num_tokens, **GREEDY), prompts))
        assert [tokens_of(updates) for updates in ran] == expected
        timings = [updates[-1].timings for updates in ran]
        assert all(one is not None and one.attempts == 1 for one in timings)
        assert sum(one.moves for one in timings if one is not None) >= 2


def test_cancelled_local_prompts_leave_nothing(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3", tmp_path)
    expected = greedy(load_oracle(folder), PROMPTS[11], NUM_TOKENS)
    chance = random.Random(7)
    with adaptive_island(folder) as island, choosing(island, anyhow(3)):

        def cancel_soon(number: int) -> None:
            with Client(island.address) as client:
                stream = client.generate(PROMPTS[number % 12], timeout=60, max_tokens=100, **GREEDY)
                for _ in range(chance.randrange(4)):
                    next(stream)
                stream.close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(cancel_soon, range(40)))
        assert tokens_of(complete(island.address, PROMPTS[11], max_tokens=NUM_TOKENS, **GREEDY)) == expected
