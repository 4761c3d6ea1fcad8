"""A new cluster takes the place of a running one of its name, on the same ports, while clients send requests."""

import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.errors import ClusterNotRunning, StartFailed
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.processes.processes import ActorSpec
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.supervision.offer import Offer
from tandem.cluster.supervision.predecessor import Predecessor
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.http_client import get
from tests.support.local_processes import LocalGroup, LocalProcesses
from tests.support.waiting import until

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "local.yaml"
LONG = 300  # tokens of a stream that is open while its gateway ends
WORKERS = 2  # of an island
PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [11, 12], [40, 3, 2, 1, 7]]
MAX_TOKENS = 6


class Room:
    """The room of one host: how many workers both clusters may have together."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.clusters: list[LocalProcesses] = []

    @property
    def free(self) -> int:
        held = [name for one in self.clusters for name in one.pids if "/gateway." not in name]
        return self.workers - len(held)


class Crowded(LocalProcesses):
    """Processes on a host with so much room. barred: none of its gateway's processes may start."""

    def __init__(self, room: Room, *, barred: bool = False) -> None:
        super().__init__()
        self._room, self._barred = room, barred
        room.clusters.append(self)

    def free_places(self, most: int, places: Sequence[int], *, gpus: int, where: Where = ANYWHERE) -> int:
        return min(most, self._room.free // sum(places))

    def start_group(
        self, specs: Sequence[ActorSpec], *, gpus: int, threads: int, where: Where = ANYWHERE
    ) -> "LocalGroup":  # type: ignore[type-arg]
        if self._barred and "/gateway." in specs[0].name:
            raise StartFailed("no gateway here")
        group = super().start_group(specs, gpus=gpus, threads=threads, where=where)
        assert self._room.free >= 0, "more workers than there is room for"
        return group


def config(model: Path, name: str, **more: object) -> ClusterConfig:
    values = {
        "name": name,
        "model.path": str(model),
        "island.threads_per_worker": 1,
        "gateway.port": 0,
        "gateway.http_port": 0,
        "gateway.processes": 1,
        "cache.num_pages": 64,
        "num_islands": 2,
    }
    return load_config(None, values | more)


@contextmanager
def running(config: ClusterConfig, processes: LocalProcesses) -> Iterator[tuple[Cluster, threading.Thread]]:
    """Runs a cluster as `tandem up` does, with the thread that ends with it."""
    cluster = Cluster(config, processes)
    cluster.start()
    offer = Offer(config.name, cluster)

    def live() -> None:
        cluster.wait()
        cluster.stop()
        offer.close()

    life = threading.Thread(target=live, daemon=True)
    life.start()
    try:
        yield cluster, life
    finally:
        cluster.give_way()
        life.join(60)


class Traffic:
    """Clients that send requests one after another until they are stopped, and compare each answer."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self.wanted = [tokens_of(complete(address, prompt, max_tokens=MAX_TOKENS, **GREEDY)) for prompt in PROMPTS]
        self.answered = 0
        self._sent = [self._pool.submit(self._send, *pair) for pair in zip(PROMPTS, self.wanted, strict=True)]

    def _send(self, prompt: list[int], wanted: list[int]) -> None:
        while not self._stopped.is_set():
            assert tokens_of(complete(self._address, prompt, max_tokens=MAX_TOKENS, **GREEDY)) == wanted
            self.answered += 1

    def go_on(self) -> None:
        """Returns when there have been more answers, or raises a client's error."""
        before = self.answered
        until(lambda: self.answered > before + len(PROMPTS) or any(one.done() for one in self._sent))
        for one in self._sent:
            if one.done():
                one.result()

    def stop(self) -> None:
        self._stopped.set()
        for one in self._sent:
            one.result()
        self._pool.shutdown()


def test_a_new_cluster_takes_islands_over_one_by_one_and_no_client_notices(small_model: Path) -> None:
    room = Room(2 * WORKERS)  # for the islands of one cluster
    old_processes = Crowded(room)
    with running(config(small_model, "turnover"), old_processes) as (old, life):
        address, http = old.grpc_address, old.http_address or ""
        traffic = Traffic(address)
        with Predecessor("turnover") as predecessor:
            newer = config(small_model, "turnover", **{"model.served_model_name": "newer"})
            new = Cluster(newer, Crowded(room), predecessor=predecessor)
            try:
                assert new.start() == address
                life.join(60)
                assert not life.is_alive()
                assert not old_processes.pids
                traffic.go_on()
                traffic.stop()
                assert new.http_address == http
                models = get(http, "/v1/models").json()
                assert [model["id"] for model in models["data"]] == ["newer"]
                with Client(address) as client:
                    assert len(client.cluster_info().islands) == 2
            finally:
                new.stop()


def test_the_old_cluster_gets_its_islands_back_when_the_new_one_fails(small_model: Path) -> None:
    room = Room(2 * WORKERS)
    with running(config(small_model, "kept"), Crowded(room)) as (old, life):
        traffic = Traffic(old.grpc_address)
        with Predecessor("kept") as predecessor, pytest.raises(StartFailed, match="no gateway here"):
            Cluster(config(small_model, "kept"), Crowded(room, barred=True), predecessor=predecessor).start()
        until(lambda: old.offered()["islands"] == 2)
        traffic.go_on()
        traffic.stop()
        assert life.is_alive()


def test_a_cluster_that_does_not_run_cannot_be_replaced() -> None:
    with pytest.raises(ClusterNotRunning, match="name is 'nobody'"):
        Predecessor("nobody")


@contextmanager
def command(model: Path, name: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `tandem up` of a small cluster that gives its calls no time when it ends."""
    settings = (f"name={name}", "cache.num_pages=64", "ray.num_cpus=2", "recovery.drain_seconds=0")
    line = [sys.executable, "-m", "tandem.cluster.cli", "up", str(DEPLOYED), "--model", str(model), "--grpc-port", "0"]
    line += [part for setting in settings for part in ("--set", setting)]
    process = subprocess.Popen([*line, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def ready(process: subprocess.Popen[str]) -> str:
    """Returns HOST:PORT of its gateway."""
    assert process.stdout is not None
    found = re.match(r"ready grpc=(\S+:\d+)", process.stdout.readline())
    assert found, process.communicate(timeout=60)[1]
    return found[1]


@pytest.mark.long
def test_tandem_up_replaces_a_cluster_whose_streams_go_on_and_a_bad_model_changes_nothing(
    small_model: Path, tmp_path: Path
) -> None:
    name = f"replaced-{os.getpid()}-{secrets.token_hex(3)}"
    with command(small_model, name) as old:
        address = ready(old)
        wanted = tokens_of(complete(address, PROMPTS[0], max_tokens=LONG, **GREEDY))
        broken = tmp_path / "broken"
        broken.mkdir()
        with command(broken, name, "--replace") as bad:
            out, said = bad.communicate(timeout=120)
        assert (bad.returncode, out) == (2, ""), said
        assert "model.path" in said
        with (
            Client(address) as client,
            command(small_model, name, "--set", "model.served_model_name=newer", "--replace") as new,
        ):
            got: list[int] = []
            while new.poll() is None and old.poll() is None:  # so that one stream is open when the old gateway ends
                got = tokens_of(list(client.generate(PROMPTS[0], max_tokens=LONG, timeout=120, **GREEDY)))
                assert got == wanted
            assert ready(new) == address
            assert old.wait(60) == 0
            assert client.model_info().name == "newer"
