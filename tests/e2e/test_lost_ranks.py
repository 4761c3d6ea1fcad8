"""A rank that is killed or stopped ends its worker within bounds, and its requests go on elsewhere, token for token."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tests.support.client_requests import complete, tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

NUM_TOKENS = 300
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "island.prefill_ranks": 2,
    "island.decode_ranks": 2,
    "island.threads_per_worker": 1,
    "gateway.processes": 1,
    "gateway.port": 0,
    "gateway.max_attempts": 20,
    "cache.num_pages": 128,
    "recovery.max_restarts": 100,
    "recovery.drain_seconds": 60.0,
    "recovery.unresponsive_seconds": 3.0,
}


@pytest.fixture(scope="module")
def processes() -> LocalProcesses:
    return LocalProcesses(STEADY)


@pytest.fixture(scope="module")
def served(small_model: Path, processes: LocalProcesses) -> Iterator[str]:
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **SETTINGS}), processes)
    yield cluster.start()
    cluster.stop()


def is_whole(address: str) -> bool:
    with Client(address) as client:
        workers = [worker for island in client.cluster_info().islands for worker in island.workers]
    return len(workers) == 2 and all(worker.free_pages == worker.num_pages for worker in workers)


def epoch_of(address: str) -> int:
    with Client(address) as client:
        (island,) = client.cluster_info().islands
    return island.epoch


def rank_of(processes: LocalProcesses, role: str, rank: int) -> int:
    """Returns the process of the newest epoch."""
    found = {
        int(match[1]): pid
        for name, pid in processes.pids.items()
        if (match := re.search(rf"\.(\d+)/{role} \(PE \d+, rank {rank}\)", name))
    }
    return found[max(found)]


def test_an_island_is_scaled_by_workers(served: str) -> None:
    prompt = random_prompt(40, 9, 512)
    due = tokens_of(complete(served, prompt, max_tokens=30, **DRAWN))
    with Client(served) as client:
        for workers, counts in ((2, (2, 1, 0)), (1, (2, 0, 1))):
            done = client.scale("", num_prefill=workers, timeout=120)
            assert (done.kept, done.started, done.ended) == counts
            assert tokens_of(list(client.generate(prompt, max_tokens=30, **DRAWN))) == due
    until(lambda: is_whole(served), 120)


@pytest.mark.gate("decode-1-SIGKILL")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=lambda blow: blow.name)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_token_is_lost_or_doubled(
    served: str, processes: LocalProcesses, role: str, rank: int, blow: signal.Signals
) -> None:
    until(lambda: is_whole(served), 120)
    epoch = epoch_of(served)
    prompts = [random_prompt(20 + 30 * number, number, 512) for number in range(3)]
    due = [tokens_of(complete(served, prompt, max_tokens=NUM_TOKENS, **DRAWN)) for prompt in prompts]

    def ask(prompt: list[int]) -> list[int]:
        with Client(served) as client:
            return tokens_of(list(client.generate(prompt, timeout=120, max_tokens=NUM_TOKENS, **DRAWN)))

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, prompt) for prompt in prompts]
        with Client(served) as client:
            until(lambda: client.cluster_info().active == 3 or any(one.done() for one in asked))
        os.kill(rank_of(processes, role, rank), blow)
        assert [one.result(120) for one in asked] == due
    until(lambda: epoch_of(served) == epoch + 1, 120)  # the worker has ended, also where nobody waited for it
    until(lambda: is_whole(served), 120)
