"""The scaling policies through the public door: load brings an island or a worker, quiet ends it, and no answer
suffers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from tandem.cluster.cli.commands import main
from tandem.cluster.cli.samples import Samples
from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.proto import inference_pb2
from tests.support.client_requests import GREEDY, tokens_of
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import greedy, load_oracle, random_prompt
from tests.support.waiting import until

OUTPUT, LONG_OUTPUT = 8, 52
ROOM = 4  # for so many of the long ones on a decode worker
OVERRIDES = {
    "name": "c",
    "island.threads_per_worker": 1,
    "gateway.port": 0,
    "gateway.processes": 1,
    "cache.num_pages": 128,
    "scaling.up_after_seconds": 3.0,
    "scaling.down_after_seconds": 1.0,
    "scaling.cooldown_seconds": 1.0,
}
ISLANDS = {"scaling.max_islands": 2, "scaling.first_token_seconds": 1e-6}  # nobody meets it
ROLES = {
    "scaling.max_workers": 3,
    "scaling.queue_seconds": 0.05,
    "cache.page_size": 16,
    "cache.num_pages": 4 * ROOM,
    "model.max_model_len": 64,
    "recovery.drain_seconds": 0.02,
}


@contextmanager
def cluster(model: Path, settings: dict[str, object]) -> Iterator[Client]:
    launched = Cluster(load_config(None, {"model.path": str(model), **OVERRIDES, **settings}), LocalProcesses())
    try:
        with Client(launched.start()) as client:
            yield client
    finally:
        launched.stop()


@contextmanager
def load(client: Client, prompt: list[int], wanted: list[int], clients: int) -> Iterator[list[int]]:
    """Runs clients that ask again and again, and checks each answer. Afterwards the list has the number of answers."""
    enough, counts = Event(), list[int]()

    def send() -> None:
        count = 0
        with Client(client.address) as own:
            while not enough.is_set():
                answer = list(own.generate(prompt, timeout=60, max_tokens=len(wanted), **GREEDY))
                assert tokens_of(answer) == wanted
                count += 1
        counts.append(count)

    with ThreadPoolExecutor(clients) as pool:
        sending = [pool.submit(send) for _ in range(clients)]
        try:
            yield counts
        finally:
            enough.set()
        for one in sending:
            one.result()


def said(client: Client, capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the output of `tandem status`."""
    with pytest.raises(SystemExit):
        main(["status", "--address", client.address])
    return capsys.readouterr().out


def decode_workers(client: Client) -> list[inference_pb2.WorkerInfo]:
    workers = [worker for island in client.cluster_info().islands for worker in island.workers]
    return [worker for worker in workers if worker.role == inference_pb2.ROLE_DECODE]


def shapes(client: Client) -> list[tuple[int, int]]:
    """Returns the prefill and decode workers of each island."""
    roles = [[worker.role for worker in island.workers] for island in client.cluster_info().islands]
    return [(one.count(inference_pb2.ROLE_PREFILL), one.count(inference_pb2.ROLE_DECODE)) for one in roles]


def test_load_brings_an_island_and_quiet_ends_it(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = random_prompt(12, 1)
    wanted = greedy(load_oracle(small_model), prompt, OUTPUT)
    with cluster(small_model, ISLANDS) as client:
        with load(client, prompt, wanted, 4) as counts:
            until(lambda: shapes(client) == [(1, 1), (1, 1)])
        assert sum(counts) >= 10
        assert "islands of 1 … 2, the policy wants " in said(client, capsys)
        until(lambda: len(client.cluster_info().islands) == 1)
        until(lambda: client.cluster_info().scaling.wanted_islands == 1)
        assert Samples(client.metrics().text).total("tandem:wanted_islands") == 1
        assert tokens_of(list(client.generate(prompt, timeout=60, max_tokens=OUTPUT, **GREEDY))) == wanted


@pytest.mark.long
def test_waiting_requests_bring_an_island_a_decode_worker_that_goes_when_none_waits(small_model: Path) -> None:
    """Requests are under way at both changes, and are given no time to end."""
    prompt = random_prompt(12, 2)
    wanted = greedy(load_oracle(small_model), prompt, LONG_OUTPUT)
    with cluster(small_model, ROLES) as client:
        with load(client, prompt, wanted, 1) as few:
            with load(client, prompt, wanted, 2 * ROOM) as many:
                until(lambda: shapes(client) == [(1, 2)])
                until(lambda: sum(bool(worker.counters.reservations) for worker in decode_workers(client)) == 2)
            until(lambda: shapes(client) == [(1, 1)])
        assert sum(many) >= 2 * ROOM
        assert sum(few) >= 1
        (island,) = client.cluster_info().islands
        assert (island.epoch, island.restarts) == (3, 0)
        assert Samples(client.metrics().text).total("tandem:replays_total") >= 1
        assert tokens_of(list(client.generate(prompt, timeout=60, max_tokens=LONG_OUTPUT, **GREEDY))) == wanted
