"""The scaling policy through the public door: load brings an island, quiet ends it, and no answer suffers."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tandem.cluster.cli.commands import main
from tandem.cluster.cli.samples import Samples
from tandem.cluster.client import Client
from tandem.cluster.config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tests.support.client_requests import GREEDY, tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.waiting import until

CLIENTS, OUTPUT = 4, 8
OVERRIDES = {
    "name": "c",
    "island.threads_per_worker": 1,
    "gateway.port": 0,
    "gateway.processes": 1,
    "cache.num_pages": 128,
    "scaling.max_islands": 2,
    "scaling.first_token_seconds": 1e-6,  # nobody meets it
    "scaling.up_after_seconds": 3.0,
    "scaling.down_after_seconds": 1.0,
    "scaling.cooldown_seconds": 1.0,
}


def test_load_brings_an_island_and_quiet_ends_it(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = random_prompt(12, 1)
    wanted = greedy(load_oracle(small_model), prompt, OUTPUT)
    cluster = Cluster(load_config(None, {"model.path": str(small_model), **OVERRIDES}), LocalProcesses())
    address, enough = cluster.start(), Event()

    def send() -> int:
        count = 0
        with Client(address) as client:
            while not enough.is_set():
                assert tokens_of(list(client.generate(prompt, timeout=60, max_tokens=OUTPUT, **GREEDY))) == wanted
                count += 1
        return count

    try:
        with Client(address) as client, ThreadPoolExecutor(CLIENTS) as pool:
            sending = [pool.submit(send) for _ in range(CLIENTS)]
            try:
                until(lambda: [len(island.workers) for island in client.cluster_info().islands] == [2, 2])
            finally:
                enough.set()
            assert sum(one.result() for one in sending) >= 10
            with pytest.raises(SystemExit):
                main(["status", "--address", address])
            assert "islands of 1 … 2, the policy wants " in capsys.readouterr().out
            until(lambda: len(client.cluster_info().islands) == 1)
            until(lambda: client.cluster_info().scaling.wanted_islands == 1)
            assert Samples(client.metrics().text).total("tandem:wanted_islands") == 1
            assert tokens_of(list(client.generate(prompt, timeout=60, max_tokens=OUTPUT, **GREEDY))) == wanted
    finally:
        cluster.stop()
