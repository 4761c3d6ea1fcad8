"""An island over several hosts: links that are down for a while, for less and for more than
recovery.partition_seconds, and the end of a Ray that forgets."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.clients_on_a_host import HostClients
from tests.e2e.host_cluster import ANSWER, OVER_HOSTS, READY_SECONDS, TOKEN, Cluster, nobody_answers, running
from tests.support.client_requests import GREEDY
from tests.support.hosts import NODE_CPUS, can_make_hosts, hosts
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.transports import skip_without
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root and `ip netns`")
OUTPUT = 32
SHORT_SECONDS = 2.0
LATER_SECONDS = 6.0  # after the link is back: what idle connections have missed shows late
SETTINGS: dict[str, Any] = {
    **OVER_HOSTS,
    "recovery.partition_seconds": 3,
    "gateway.max_attempts": 20,
    "cache.num_pages": 256,
    "metrics.port": 0,
}
FAR = 1  # beside the host of the launcher and the gateway
THIRD = 2  # joins for a while


@pytest.fixture(scope="module", params=["tcp", pytest.param("nixl", marks=pytest.mark.long)])
def cluster(
    small_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """One island: its prefill worker is on the first host, which has more room, and its decode worker on the other."""
    skip_without(request.param)
    settings = SETTINGS | {"island.transport": request.param}
    with hosts(4) as made:
        made.start_ray(0, cpus=NODE_CPUS + 1)
        made.start_ray(FAR)
        with running(made, tmp_path_factory.mktemp("partitions"), small_model, settings) as cluster:
            yield cluster


@contextmanager
def clients(cluster: Cluster, model: Path, folder: Path) -> Iterator[HostClients]:
    """Runs clients on the last host, and yields once they have had answers."""
    prompts = [random_prompt(5 + 13 * number, number) for number in range(6)]
    expected = greedy_all(load_oracle(model), prompts, OUTPUT)
    sampling = GREEDY | {"max_tokens": OUTPUT}
    cases = [[prompt, sampling, tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    program = [sys.executable, "-m", "tests.chaos.clients_on_a_host", cluster.address, str(cluster.ca)]
    command = cluster.hosts.command(3, *program)
    with HostClients(command, cluster.hosts.environment | {"TOKEN": TOKEN}, cases, folder) as asking:
        _await_streams(asking)
        yield asking


def _await_streams(asking: HostClients) -> None:
    """Waits until more streams have finished than can have been under way."""
    enough = asking.streams + 16
    until(lambda: asking.streams >= enough)


def _island(cluster: Cluster) -> dict[str, Any]:
    return cluster.info()["islands"][0]


def _workers(cluster: Cluster, host: int) -> list[str]:
    """Returns the names of processes that write into pages."""
    found: list[str] = []
    for pid in cluster.hosts.pids(host):
        try:
            name = Path(f"/proc/{pid}/comm").read_text()
        except OSError:
            continue
        if name.startswith(("prefill (PE", "decode (PE")):
            found.append(name.strip())
    return found


@pytest.mark.long
@pytest.mark.timeout(400)  # with the start of all
def test_an_island_over_several_hosts_serves_a_client_of_another(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    hosts = cluster.hosts
    ((host, workers),) = cluster.islands().values()
    assert [worker.rpartition(":")[0] for worker in workers] == hosts.addresses[:2]
    assert host == ", ".join(hosts.addresses[:2])
    assert [address.startswith("127.0.0.1:") for address in cluster.metrics] == [True]
    nobody_answers(cluster, tmp_path)
    hosts.start_ray(THIRD)
    cluster.scale("--decode", "2")
    ((host, workers),) = cluster.islands().values()
    assert host == ", ".join(worker.rpartition(":")[0] for worker in workers) == ", ".join(hosts.addresses[:3])
    prompts = [random_prompt(5 + 11 * number, number) for number in range(12)]
    assert cluster.answers(tmp_path, prompts) == greedy_all(load_oracle(small_model), prompts, ANSWER)
    refused = cluster.refused("scale", "--decode", "200")
    assert "num_decode is 200: island " in refused
    assert "201 processes are needed, with 0.1 CPUs for each; at most " in refused
    cluster.scale("--decode", "1")
    assert [len(workers) for _, workers in cluster.islands().values()] == [2]
    hosts.lose(THIRD)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_link_that_is_down_for_a_moment_pauses_streams(cluster: Cluster, small_model: Path, tmp_path: Path) -> None:
    before = _island(cluster)
    with clients(cluster, small_model, tmp_path) as asking:
        cluster.hosts.unplug(FAR)
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                asking.wait(SHORT_SECONDS)
        finally:
            cluster.hosts.unplug(FAR, down=False)
        _await_streams(asking)
        with pytest.raises(subprocess.TimeoutExpired):
            asking.wait(LATER_SECONDS)
        asking.stop()
    after = _island(cluster)
    assert [before[key] for key in ("epoch", "restarts")] == [after[key] for key in ("epoch", "restarts")]
    assert set(asking.outcomes) == {"finished"}
    assert set(asking.attempts) == {1}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_workers_behind_a_link_that_stays_down_end_themselves_and_streams_go_on(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    """They have ended before the link is back, so that nothing of theirs is written then.

    A short stream may have all its tokens when the link goes down, and then it is not placed again. A long one is.
    """
    assert _workers(cluster, FAR) == ["decode (PE 1)"]
    before = _island(cluster)
    here = [cluster.address]
    with clients(cluster, small_model, tmp_path) as asking:
        try:
            with cluster.going_on(here) as lost:
                cluster.hosts.unplug(FAR)
            until(lambda: not _workers(cluster, FAR))
            _await_streams(asking)
            after = _island(cluster)
        finally:
            cluster.hosts.unplug(FAR, down=False)
        _await_streams(asking)
        asking.stop()
    assert set(asking.outcomes) == {"finished"}
    with cluster.going_on(here) as undisturbed:
        pass
    assert lost["tokens"] == undisturbed["tokens"]
    assert lost["attempts"] > undisturbed["attempts"] == 1
    assert int(after["epoch"]) > int(before["epoch"])
    assert after["host"] == cluster.hosts.addresses[0]
    assert not _workers(cluster, FAR)


@pytest.mark.timeout(300)
def test_a_gcs_that_comes_back_without_what_it_knew_ends_the_cluster_with_words(cluster: Cluster) -> None:
    """This is the last test of this cluster."""
    cluster.hosts.end_gcs()
    until(lambda: cluster.info()["starts_nothing"])
    cluster.hosts.start_gcs()
    assert cluster.launcher.wait(READY_SECONDS) == 1
    assert "is lost: its GCS has started anew, without what it knew" in cluster.log.read_text()
    until(lambda: not _workers(cluster, 0))
