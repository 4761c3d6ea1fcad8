"""A model with recurrent layers in a cluster of processes, of which one dies: states are computed again."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.support.client_requests import GREEDY, complete_all, tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import greedy, greedy_all, load_oracle, random_prompt
from tests.support.steady_steps import STEADY
from tests.support.waiting import until

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY, CHUNK = 512, 64
FAMILIES = ("qwen3_next", "kimi_linear", "nemotron_h")
RANKS = ":ranks"  # behind a family: its prompts are computed by one rank, its outputs by two
SETTINGS: dict[str, Any] = {
    "island.threads_per_worker": 1,
    "island.verify_kv": True,
    "gateway.processes": 1,
    "gateway.port": 0,
    "gateway.max_attempts": 20,
    "cache.num_pages": 64,
    "scheduler.max_batch_tokens": CHUNK,
    "scheduler.max_sequences": 4,
    "recovery.max_restarts": 20,
    "recovery.drain_seconds": 60.0,  # an answer takes long on a busy machine
}


@dataclass(frozen=True)
class Served:
    """folder: of the checkpoint. address: HOST:PORT."""

    folder: str
    address: str
    oracle: "PreTrainedModel"

    def island(self) -> inference_pb2.IslandInfo:
        with Client(self.address) as client:
            (island,) = client.cluster_info().islands
        return island

    def serves(self, epoch: int) -> bool:
        island = self.island()
        return island.epoch == epoch and len(island.workers) == 2


@pytest.fixture(scope="module", params=["qwen3_next"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, ranks = request.param.removesuffix(RANKS), 1 + request.param.endswith(RANKS)
    folder = tmp_path_factory.mktemp(family)
    make_checkpoint(folder, family)
    settings = {"model.path": str(folder), "island.decode_ranks": ranks, **SETTINGS}
    cluster = Cluster(load_config(None, settings), LocalProcesses(2 * STEADY))
    address = cluster.start()
    try:
        yield Served(str(folder), address, load_oracle(folder))
    finally:
        cluster.stop()


@pytest.mark.gate("qwen3_next-decode")
@pytest.mark.parametrize(
    ("served", "lost"),
    [(family + ranks, lost) for ranks in ("", RANKS) for family in FAMILIES for lost in (0, 1)],
    indirect=["served"],
    scope="module",
    ids=[f"{family}{ranks}-{lost}" for ranks in ("", RANKS) for family in FAMILIES for lost in ("prefill", "decode")],
)
def test_a_worker_dies_and_no_token_is_lost(served: Served, lost: int) -> None:
    """Another request goes on, and one comes later. The clients' tokens are computed again as a prompt."""
    prompt, count = random_prompt(CHUNK - 10, 7 + lost, VOCABULARY), 2 * CHUNK
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
    prompts = [random_prompt(length, length, VOCABULARY) for length in (1, CHUNK, CHUNK + 1, 2 * CHUNK + 3)]
    assert complete_all(served.address, prompts, max_tokens=9, **GREEDY) == greedy_all(served.oracle, prompts, 9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation.method": "mtp"}, r"^speculation\.method: speculation\.method is mtp; .* has no weights mtp\.\*"),
        (
            {"cache.kv_cache_dtype": "fp8_e4m3"},
            r"cache\.kv_cache_dtype is 'fp8_e4m3', which .* keeps recurrent states, .*: set auto",
        ),
    ],
    ids=["drafts", "8 bits"],
)
def test_a_cluster_refuses_what_states_do_not_have(served: Served, settings: dict[str, Any], message: str) -> None:
    config = load_config(None, {"model.path": served.folder, **SETTINGS, **settings})
    with pytest.raises((ConfigError, ValueError), match=message):
        Cluster(config, LocalProcesses()).start()
