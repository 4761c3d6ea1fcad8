"""Tests that what arrives at the decode worker equals what the prefill worker holds, bit for bit, however it
travelled."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.attention.forward import Batch
from tandem.workers.worker import Worker
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete, complete_all, complete_all_updates, tokens_of
from tests.support.held_prefill import prefill_held
from tests.support.island import Island, running_island
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.transports import skip_without
from tests.support.tvm_cache import TvmCache

PAGE = 8
PROBE = 1 << 20  # a sequence id that no request has


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(params=["shared_memory", "tcp", "nixl"])
def island(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Island]:
    skip_without(request.param)
    settings = {"island.num_decode": 3, "scheduler.max_batch_tokens": 512, "island.transport": request.param}
    with running_island(checkpoint, settings) as island:
        yield island


def held_kv(worker: Worker, tokens: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Returns K and V per layer of the longest prefix of `tokens` in whole pages that the worker holds."""

    def read() -> list[tuple[Tensor, Tensor]]:
        cache = TvmCache.of(worker.cache)
        cache.add_sequence(PROBE)
        length = cache.match_prefix(PROBE, list(tokens))
        kv = [(k.clone(), v.clone()) for k, v in cache.gather_kv(PROBE, 0, length)]
        cache.remove_sequence(PROBE)
        return kv

    return worker.on_step_thread(read)


def forget(worker: Worker) -> None:
    worker.on_step_thread(TvmCache.of(worker.cache).clear_prefixes)


def recorded_forwards(worker: Worker) -> list[list[int]]:
    """Records, from now on, how many tokens of each sequence every forward of the worker computes, ascending."""
    forwards: list[list[int]] = []
    begin = worker.cache.begin

    def record(batch: Batch, *more: Any) -> Forward:
        forward = begin(batch, *more)
        forwards.append(sorted(np.diff(forward.tokens.qo_indptr).tolist()))
        return forward

    worker.cache.begin = record  # type: ignore[method-assign]
    return forwards


def holder(island: Island, prompt: Sequence[int]) -> Worker:
    """Returns the decode worker that served the prompt."""
    (found,) = [worker for worker in island.workers[1:] if held_kv(worker, prompt)[0][0].shape[0]]
    return found


def assert_same_kv(island: Island, prompts: Sequence[Sequence[int]]) -> None:
    for prompt in prompts:
        sent, landed = held_kv(island.workers[0], prompt), held_kv(holder(island, prompt), prompt)
        whole = (len(prompt) - 1) // PAGE * PAGE
        assert len(sent) == len(landed) == 2
        for (k, v), (landed_k, landed_v) in zip(sent, landed, strict=True):
            assert k.shape[0] == whole
            assert torch.equal(k, landed_k)
            assert torch.equal(v, landed_v)


def test_token_push(island: Island) -> None:
    prompts = [random_prompt(61, 0), random_prompt(23, 9)]
    with prefill_held(island, 2):  # one that is alone would go page to page
        of_both = complete_all_updates(island.address, prompts, max_tokens=2, **GREEDY)
    assert_same_kv(island, prompts)
    for prompt, updates in zip(prompts, of_both, strict=True):
        timings, usage = updates[-1].timings, updates[-1].usage
        assert timings is not None
        assert usage is not None
        assert timings.bytes_pushed == len(prompt) * island.workers[0].cache.layout.token_bytes
        assert usage.cached_tokens == 0


def test_page_to_page_push(checkpoint: Path, island: Island) -> None:
    """It is the second turn of a conversation, which the prefill worker still holds and the decode worker does not."""
    first = random_prompt(61, 1)
    tokens = tokens_of(complete(island.address, first, max_tokens=4, **GREEDY))
    second = first + tokens + random_prompt(20, 2)
    for worker in island.workers[1:]:
        forget(worker)
    updates = complete(island.address, second, max_tokens=6, **GREEDY)
    assert tokens_of(updates) == greedy(load_oracle(checkpoint), second, 6)
    assert_same_kv(island, [second])
    usage, timings = updates[-1].usage, updates[-1].timings
    assert usage is not None
    assert timings is not None
    assert usage.cached_tokens == 56  # whole pages of the first turn's prompt
    assert timings.bytes_pushed == len(second) * island.workers[0].cache.layout.token_bytes


def test_decode_worker_holds_more_than_the_sender(checkpoint: Path, island: Island) -> None:
    """The decode worker keeps the answer's KV too: the sender computes it again but does not send it."""
    first = random_prompt(40, 3)
    tokens = tokens_of(complete(island.address, first, max_tokens=25, **GREEDY))
    second = first + tokens + random_prompt(10, 4)
    updates = complete(island.address, second, max_tokens=6, **GREEDY)
    assert tokens_of(updates) == greedy(load_oracle(checkpoint), second, 6)
    timings = updates[-1].timings
    assert timings is not None
    assert timings.bytes_pushed == (len(second) - 64) * island.workers[0].cache.layout.token_bytes


def test_both_kinds_in_one_forward_for_several_receivers(checkpoint: Path, island: Island) -> None:
    old = [random_prompt(30, seed) for seed in range(10, 14)]
    complete_all(island.address, old, max_tokens=2, **GREEDY)
    for worker in island.workers[1:]:
        forget(worker)
    prompts = [prompt + random_prompt(9, 20) for prompt in old] + [random_prompt(33, seed) for seed in range(30, 34)]
    expected = greedy_all(load_oracle(checkpoint), prompts, 5)
    forwards = recorded_forwards(island.workers[0])
    with prefill_held(island, len(prompts)):
        assert complete_all(island.address, prompts, max_tokens=5, **GREEDY) == expected
    assert forwards == [[15] * 4 + [33] * 4], "what was not known of each prompt"
    assert_same_kv(island, prompts)
    assert len({id(holder(island, prompt)) for prompt in prompts}) == 3


@pytest.mark.parametrize("chunk", [1, 13, 512])
def test_kv_equals_a_local_computation(checkpoint: Path, chunk: int) -> None:
    """The number of chunks does not matter."""
    prompt = random_prompt(57, 40)
    with running_island(checkpoint, {"scheduler.max_batch_tokens": chunk}) as island:
        complete(island.address, prompt, max_tokens=2, **GREEDY)
        landed = held_kv(holder(island, prompt), prompt)
    with torch.inference_mode():
        cache = load_oracle(checkpoint)(torch.tensor([prompt]), use_cache=True).past_key_values
    assert len(landed) == 2
    for layer, (k, v) in enumerate(landed):
        assert k.shape[0] == 56
        torch.testing.assert_close(k, cache.layers[layer].keys[0, :, :56].transpose(0, 1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(v, cache.layers[layer].values[0, :, :56].transpose(0, 1), rtol=1e-4, atol=1e-5)
