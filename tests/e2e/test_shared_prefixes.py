"""64 requests with a common system prompt, on one decode worker: its pages are attended to once for all of them."""

from functools import partial
from pathlib import Path

import pytest

from tandem.cache.attention import batch_prefixes
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.shared_prefixes import SharedPrefixes, find_shared_prefixes
from tandem.workers import worker
from tandem.workers.runner.model_cache import make_cache
from tests.cache.sharing_kernels import sharing_all
from tests.support.checkpoints import save_checkpoint
from tests.support.client_requests import GREEDY, complete_all
from tests.support.held_prefill import prefill_held
from tests.support.island import running_island
from tests.support.oracle import greedy_all, load_oracle, random_prompt

NUM_REQUESTS, NUM_TOKENS, PAGE_SIZE = 64, 10, 8  # the page size is the island's
SYSTEM = random_prompt(12 * PAGE_SIZE + 3, seed=1)
PROMPTS = [SYSTEM + random_prompt(1 + number % 5, seed=100 + number) for number in range(NUM_REQUESTS)]


def test_tokens_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[SharedPrefixes] = []

    def find(*args: object) -> SharedPrefixes | None:
        shared = find_shared_prefixes(*args)  # type: ignore[arg-type]
        found.extend([] if shared is None else [shared])
        return shared

    monkeypatch.setattr(batch_prefixes, "find_shared_prefixes", find)
    monkeypatch.setattr(worker, "make_cache", partial(make_cache, kernels=sharing_all(TorchKernels)))
    folder = save_checkpoint("qwen3", tmp_path)
    expected = greedy_all(load_oracle(folder), PROMPTS, NUM_TOKENS)
    settings = {"scheduler.max_sequences": NUM_REQUESTS, "scheduler.max_batch_tokens": 512, "cache.num_pages": 400}
    with running_island(folder, settings) as island:
        assert complete_all(island.address, [SYSTEM], max_tokens=2, **GREEDY)  # its pages are known from now on
        with prefill_held(island, NUM_REQUESTS):  # one forward for all, so that they land together
            assert complete_all(island.address, PROMPTS, max_tokens=NUM_TOKENS, **GREEDY) == expected
    most = max(found, key=lambda shared: shared.members.size)
    assert most.members.size >= NUM_REQUESTS // 4  # on a loaded machine they land over several steps
    assert int(most.kv_indptr[1]) == len(SYSTEM) // PAGE_SIZE
