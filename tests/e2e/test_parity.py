"""Tokens through the gRPC door equal transformers' greedy generation, for every family and config feature."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event

import pytest

from tandem.workers.config import Role
from tests.checkpoints import CASES, save_checkpoint
from tests.island import Island, running_island
from tests.oracle import greedy_all, load_oracle, random_prompt
from tests.requests import GREEDY, complete, complete_all, tokens_of

CHUNK, PAGE = 48, 8
# One token; around a page, around a chunk, several chunks.
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
OUTPUT = 12


@contextmanager
def first_tokens_held(island: Island, tokens: int) -> Iterator[None]:
    """No prompt is computed before requests of so many tokens, those of prompts twice, have been placed."""
    name, all_placed = island.workers[0].config.island, Event()
    prefill = [worker for worker in island.workers if worker.config.role == Role.PREFILL]
    stopped = Barrier(1 + len(prefill), timeout=60)

    def wait_until_placed() -> None:
        deadline = time.monotonic() + 60
        while asyncio.run(island.gateway.placed_tokens(name)) < tokens and time.monotonic() < deadline:
            time.sleep(0.01)
        all_placed.set()

    def hold() -> bool:
        stopped.wait()
        return all_placed.wait(60)

    with ThreadPoolExecutor(1 + len(prefill)) as pool:
        held = [pool.submit(worker.on_step_thread, hold, timeout=120) for worker in prefill]
        waited = pool.submit(wait_until_placed)
        stopped.wait()
        yield
        waited.result()
        assert all(answer.result() for answer in held)


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def island(checkpoint: Path) -> Iterator[Island]:
    # Dynamic RoPE goes beyond what config.json calls the limit.
    with running_island(checkpoint, {"scheduler.max_batch_tokens": CHUNK}) as island:
        yield island


def test_alone_and_sixteen_at_once(checkpoint: Path, island: Island) -> None:
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS * 2)]
    expected = greedy_all(load_oracle(checkpoint), prompts, OUTPUT)
    for prompt, tokens in list(zip(prompts, expected, strict=True))[: len(LENGTHS)]:
        assert tokens_of(complete(island.address, prompt, max_tokens=OUTPUT, **GREEDY)) == tokens
    assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen3"])
def test_two_prefill_and_two_decode_workers(case: str, tmp_path: Path) -> None:
    folder = save_checkpoint(case, tmp_path)
    prompts = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS * 2)]
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT)
    two_and_two = {"island.num_prefill": 2, "island.num_decode": 2, "scheduler.max_batch_tokens": CHUNK}
    with running_island(folder, two_and_two) as island:
        with first_tokens_held(island, sum(2 * len(prompt) + OUTPUT for prompt in prompts)):
            assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected
        with island.client() as client:
            workers = client.cluster_info().islands[0].workers
        assert all(worker.cached_pages > 0 for worker in workers), "every worker took part"


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_split_at_any_position(chunk: int, tmp_path: Path) -> None:
    """Chunks of any size, page borders or not, give the tokens of one forward."""
    folder = save_checkpoint("llama", tmp_path)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((1, 5, 16, 17, 40))]
    expected = greedy_all(load_oracle(folder), prompts, OUTPUT)
    with running_island(folder, {"scheduler.max_batch_tokens": chunk, "cache.page_size": 16}) as island:
        assert complete_all(island.address, prompts, max_tokens=OUTPUT, **GREEDY) == expected


def test_layers_with_a_window_have_fewer_pages(tmp_path: Path) -> None:
    """As many as three sequences' windows and one forward can use; what is behind them is in use again all the time."""
    folder = save_checkpoint("gemma3", tmp_path)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((CHUNK + 5, 3 * CHUNK, 70, 9, 110, 40))]
    settings = {"scheduler.max_batch_tokens": 16, "scheduler.max_sequences": 3}
    with running_island(folder, settings) as island:
        assert {tuple(pool.shape[0] for pool in worker.pools) for worker in island.workers} == {(48, 256)}
        expected = greedy_all(load_oracle(folder), prompts, 60)
        assert complete_all(island.address, prompts, max_tokens=60, **GREEDY) == expected
