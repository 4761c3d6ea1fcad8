"""DeepSeek-V4 in a cluster of processes: gRPC and HTTP, seeds, drafts, prefixes under pressure, workers that die."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.support.client_requests import GREEDY, complete, complete_all_updates, tokens_of
from tests.support.drafters import SPECULATING
from tests.support.http_client import COMPLETIONS, answer, chunks
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY, CHUNK, OUTPUT = 512, 48, 24
BORDER = 128  # positions of the longest entry, and of the coarsest page
SETTINGS: dict[str, Any] = {
    **SPECULATING,
    "island.threads_per_worker": 1,
    "island.verify_kv": True,
    "gateway.processes": 1,
    "gateway.port": 0,
    "gateway.http_port": 0,
    "gateway.max_attempts": 20,
    "cache.page_size": 16,
    "cache.num_pages": 48,
    "scheduler.max_batch_tokens": CHUNK,
    "scheduler.max_sequences": 4,
    "recovery.max_restarts": 20,
    "recovery.drain_seconds": 60.0,  # an answer takes long on a busy machine
}


@dataclass(frozen=True)
class Served:
    """The served cluster. address, http: HOST:PORT."""

    address: str
    http: str
    oracle: "PreTrainedModel"

    def island(self) -> inference_pb2.IslandInfo:
        with Client(self.address) as client:
            (island,) = client.cluster_info().islands
        return island

    def serves(self, epoch: int) -> bool:
        island = self.island()
        return island.epoch == epoch and len(island.workers) == 2

    def cached(self, prompt: list[int]) -> int:
        """Returns the cached positions of the prompt, by a request for one token."""
        usage = complete(self.address, prompt, max_tokens=1, **GREEDY)[-1].usage
        assert usage is not None
        return usage.cached_tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("deepseek_v4")
    make_checkpoint(folder, "deepseek_v4")
    cluster = Cluster(load_config(None, {"model.path": str(folder), **SETTINGS}), LocalProcesses(2 * STEADY))
    address = cluster.start()
    try:
        with Client(address) as client:
            http = client.cluster_info().http_address
        yield Served(address, http, load_oracle(folder))
    finally:
        cluster.stop()


def over_http(served: Served, prompt: list[int], **sampling: Any) -> list[int]:
    """Returns the tokens of a stream."""
    body = {"prompt": prompt, "return_token_ids": True, **sampling}
    found = chunks(served.http, COMPLETIONS, **body)
    return [token for chunk in found for choice in chunk["choices"] for token in choice["token_ids"]]


def repeating(seed: int) -> list[int]:
    """Makes a prompt in which prompt lookup finds drafts."""
    return random_prompt(9, seed, VOCABULARY) * 4


def test_both_doors_give_the_tokens_of_transformers(served: Served) -> None:
    """Prompts end within an entry, around one of 4 and of 128 positions, and have drafts."""
    prompts = [random_prompt(length, length, VOCABULARY) for length in (3, BORDER - 1, BORDER + 5)] + [repeating(1)]
    expected = greedy_all(served.oracle, prompts, OUTPUT)
    updates = complete_all_updates(served.address, prompts, max_tokens=OUTPUT, **GREEDY)
    assert [tokens_of(one) for one in updates] == expected
    usages = [one[-1].usage for one in updates]
    assert sum(usage.drafted_tokens for usage in usages if usage) > 0
    assert [over_http(served, prompt, max_tokens=OUTPUT, **GREEDY) for prompt in prompts] == expected
    whole = answer(served.http, COMPLETIONS, prompt=prompts[1], max_tokens=OUTPUT, return_token_ids=True, **GREEDY)
    assert whole["choices"][0]["token_ids"] == expected[1]


@pytest.mark.long
def test_a_seed_gives_the_same_tokens_twice_through_both_doors(served: Served) -> None:
    prompt = repeating(2)
    sampling: dict[str, Any] = {"max_tokens": OUTPUT, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
    first = tokens_of(complete(served.address, prompt, seed=5, **sampling))
    assert tokens_of(complete(served.address, prompt, seed=5, **sampling)) == first
    assert over_http(served, prompt, seed=5, **sampling) == first
    assert tokens_of(complete(served.address, prompt, seed=6, **sampling)) != first
    assert first != greedy(served.oracle, prompt, OUTPUT)


@pytest.mark.long
def test_prefixes_are_evicted_under_pressure_and_computed_again(served: Served) -> None:
    """48 pages of 16 positions hold few prompts of this length. A found prefix gives the same tokens."""
    prompt = random_prompt(2 * BORDER + 3, 40, VOCABULARY)
    expected = greedy(served.oracle, prompt, OUTPUT)
    assert served.cached(prompt) == 0
    assert served.cached(prompt) == 2 * BORDER
    assert tokens_of(complete(served.address, prompt, max_tokens=OUTPUT, **GREEDY)) == expected
    others = [random_prompt(2 * BORDER + 3, seed, VOCABULARY) for seed in range(41, 47)]
    for other, tokens in zip(others, greedy_all(served.oracle, others, 4), strict=True):
        assert tokens_of(complete(served.address, other, max_tokens=4, **GREEDY)) == tokens
    assert served.cached(prompt) == 0, "nothing was evicted"
    assert tokens_of(complete(served.address, prompt, max_tokens=OUTPUT, **GREEDY)) == expected


@pytest.mark.gate("decode")
@pytest.mark.parametrize("lost", [0, 1], ids=["prefill", "decode"])
def test_a_worker_dies_and_no_token_is_lost(served: Served, lost: int) -> None:
    """The island forms again. The client's tokens are computed again as a prompt, whose entries end elsewhere."""
    prompt, count = random_prompt(BORDER - 30, 7 + lost, VOCABULARY), BORDER + 40
    expected = greedy(served.oracle, prompt, count)
    island, updates = served.island(), []
    pid = island.workers[lost].pid
    with Client(served.address) as client:
        for update in client.generate(prompt, timeout=100, max_tokens=count, **GREEDY):
            updates.append(update)
            if len(updates) == 3:
                os.kill(pid, signal.SIGKILL)
    assert tokens_of(updates) == expected
    timings = updates[-1].timings
    assert timings is not None
    assert timings.attempts == 1 + lost  # what decodes does not need the prefill worker
    until(lambda: served.serves(island.epoch + 1))
