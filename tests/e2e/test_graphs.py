"""The whole path with prompts and decode steps in graph buffers, these one step ahead, as on a GPU; here what would be
a graph is run anew."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.workers import worker
from tandem.workers.runner.decode_graphs import DecodeGraphs
from tandem.workers.runner.model_cache import make_cache
from tandem.workers.runner.model_runner import ModelRunner
from tandem.workers.sampling.pending_samples import PendingSamples
from tests.cache.table_kernels import TableKernels
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.sliding_oracle import slide_greedily
from tests.support.tvm_cache import TvmCache

SETTINGS = {"scheduler.max_sequences": 12, "cache.prefix_sharing": False}
PROMPTS = [random_prompt(7 + 3 * number, seed=number) for number in range(14)]
DRAWN = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9, "logprobs": 2, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("graphs"))


def rerun(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return compute


@pytest.fixture
def island(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Island]:
    steps, prompts = ModelRunner.capture_steps, ModelRunner.capture_prompts

    def capture_steps(runner: ModelRunner, max_sequences: int) -> None:
        steps(runner, max_sequences, rerun)
        assert runner.overlaps

    def capture_prompts(runner: ModelRunner, max_tokens: int) -> None:
        prompts(runner, max_tokens, rerun)
        assert runner.has_prompt_graph(len(PROMPTS), max_tokens)

    monkeypatch.setattr(worker, "make_cache", partial(make_cache, kernels=TableKernels))
    monkeypatch.setattr(ModelRunner, "capture_steps", capture_steps)
    monkeypatch.setattr(ModelRunner, "capture_prompts", capture_prompts)
    with running_island(folder, SETTINGS) as island:
        yield island
        for one in island.workers:
            assert TvmCache.of(one.cache).is_empty
            assert one.cache.pages.free == one.cache.pages.total


def test_tokens_equal_transformers(island: Island, folder: Path) -> None:
    """There are more requests than places, of unlike lengths, so the batch grows, shrinks and crosses buckets."""
    oracle = load_oracle(folder)
    expected = [greedy(oracle, prompt, 16) for prompt in PROMPTS]
    assert complete_all(island.address, PROMPTS, max_tokens=16, **GREEDY) == expected
    stop = expected[0][6]
    stopped = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected]
    assert complete_all(island.address, PROMPTS, max_tokens=16, stop_token_ids=[stop], **GREEDY) == stopped


def test_requests_slide_beside_others(island: Island, folder: Path) -> None:
    """Their steps are one ahead, too, and a batch with a sliding row has rows that do not slide."""
    oracle, sliding = load_oracle(folder), {"window": 12, "sinks": 2}
    plain, slid = [greedy(oracle, prompt, 24) for prompt in PROMPTS[:2]], PROMPTS[2:4]
    expected = [slide_greedily(oracle, prompt, 40, **sliding) for prompt in slid]
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(complete_all, island.address, PROMPTS[:2], max_tokens=24, **GREEDY)
        found = complete_all(island.address, slid, max_tokens=40, sliding=sliding, **GREEDY)
        assert (found, beside.result()) == (expected, plain)


def test_draws_and_logprobs_equal_those_of_plain_steps(island: Island, folder: Path) -> None:
    ahead = [complete(island.address, prompt, **DRAWN) for prompt in PROMPTS[:3]]
    together = complete_all(island.address, PROMPTS[:3], **DRAWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.undo()
        patch.setattr(worker, "make_cache", make_cache)
        for capture in ("capture_steps", "capture_prompts"):
            patch.setattr(ModelRunner, capture, lambda self, count: None)
        with running_island(folder, SETTINGS) as plain:
            at_once = [complete(plain.address, prompt, **DRAWN) for prompt in PROMPTS[:3]]
    assert [tokens_of(updates) for updates in ahead] == [tokens_of(updates) for updates in at_once] == together
    for ours, theirs in zip(ahead, at_once, strict=True):
        mine = [one.logprob for update in ours for one in update.logprobs]
        assert len(mine) == DRAWN["max_tokens"]
        assert mine == pytest.approx([one.logprob for update in theirs for one in update.logprobs], abs=1e-4)


def test_a_lone_request_steps_as_foreseen(island: Island, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step is filled in before its KV lands; tokens are those that it samples otherwise, at any length."""
    foreseen, launched = DecodeGraphs.step_foreseen, []

    def counted(graphs: DecodeGraphs, *arguments: Any) -> PendingSamples | None:
        launched.append(foreseen(graphs, *arguments))
        return launched[-1]

    for seed, prompt in enumerate(PROMPTS[:9]):
        tokens = []
        for step in (counted, lambda *_: None):
            monkeypatch.setattr(DecodeGraphs, "step_foreseen", step)
            params = {"max_tokens": 2 + seed, "temperature": 0.9, "top_k": 30, "seed": seed, "ignore_eos": True}
            tokens.append(complete_all(island.address, [prompt], **params))
        assert tokens[0] == tokens[1]
    assert len(launched) == 9
    assert None not in launched
