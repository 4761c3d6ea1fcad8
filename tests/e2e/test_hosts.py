"""A cluster of three hosts, which are network namespaces of this machine, and a client on a fourth."""

import os
import secrets
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.cluster.text.tokenizer import Tokenizer
from tandem.workers.wire.messages import prompt_to_bytes
from tests.e2e.host_cluster import ANSWER, OURS, READY_SECONDS, Cluster, nobody_answers, running
from tests.support.hosts import Hosts, can_make_hosts, hosts, process_name
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.process_hosts import process_host_of
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root and `ip netns`")
GATEWAYS: dict[str, object] = {"gateway.nodes": "all", "gateway.port": 50061}
OWN_BYTES = 80 << 20  # of a gateway; torch would take twice as much
OF_CLUSTER = (*OURS, "ray::ProcessHos", "tandem: ")
ISLANDS: dict[str, object] = {"num_islands": 2, "recovery.partition_seconds": 4}


def _own_bytes(pid: int) -> int:
    """Returns the memory that no other process shares."""
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(words[1]) << 10 for words in fields if words[0].startswith("Private_"))


@pytest.fixture(scope="module")
def joined_hosts() -> Iterator[Hosts]:
    """Makes three hosts in one Ray, whose GCS keeps its state, and one host for clients."""
    with hosts(4, remembers=True) as made:
        for host, niceness in enumerate((0, 0, 1)):  # one by one: two that start at once take the same socket's name
            made.start_ray(host, niceness=niceness)
        yield made


@pytest.fixture(scope="module")
def cluster(joined_hosts: Hosts, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = GATEWAYS | ISLANDS | {"metrics.port": 50062, "metrics.host": joined_hosts.addresses[0]}
    with running(joined_hosts, tmp_path_factory.mktemp("hosts"), small_model, settings) as cluster:
        yield cluster


@pytest.mark.timeout(600)  # with the start of all
def test_islands_are_spread_over_the_hosts_and_serve_a_client_of_another(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    assert len({host for host, _ in cluster.islands().values()}) == 2
    replace(cluster, addresses=cluster.addresses[1:]).scale("--islands", "3")  # by another host's gateway
    until(lambda: len(cluster.islands()) == 3)  # this gateway may hear of it after the one that was asked
    islands = cluster.islands()
    assert sorted(host for host, _ in islands.values()) == cluster.hosts.addresses[:3]
    for host, workers in islands.values():
        assert len(workers) == 2
        assert all(worker.startswith(f"{host}:") for worker in workers)
    prompts = [random_prompt(5 + 7 * number, number) for number in range(24)]
    assert cluster.answers(tmp_path, prompts) == greedy_all(load_oracle(small_model), prompts, ANSWER)


def test_a_ray_that_lets_other_processes_go_first_is_named(cluster: Cluster) -> None:
    said = [line for line in cluster.log.read_text().splitlines() if "niceness" in line]
    assert len(said) == 1
    assert f"the Ray on {cluster.hosts.addresses[2]} runs its processes with niceness 1," in said[0]
    assert "RAY_worker_niceness=0" in said[0]


def test_any_gateway_serves_any_island_and_takes_a_request_over_from_another_host(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    assert cluster.gateways() == sorted(address.rpartition(":")[0] for address in cluster.addresses)
    assert cluster.gateways() == cluster.hosts.addresses[:3]
    prompts = [random_prompt(5 + 3 * number, 300 + number) for number in range(6)]
    expected = greedy_all(load_oracle(small_model), prompts, ANSWER)
    for address in cluster.addresses[1:]:
        assert replace(cluster, addresses=[address]).answers(tmp_path, prompts) == expected
    said = cluster.done("takes_over")
    assert said["tokens"] == said["whole"]
    assert said["ended"] == ["ABORTED: a later call has taken request_id 'mine' over"] * 2
    until(lambda: cluster.held()[:2] == (0, {0}))


def test_gateways_of_several_hosts_see_what_the_others_have_placed(cluster: Cluster) -> None:
    assert cluster.done("beside")


def test_of_200_requests_some_are_cancelled_and_nothing_is_left(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    prompts = [random_prompt(5 + number % 8, 1000 + number) for number in range(200)]
    cancelled = range(0, len(prompts), 3)
    answers = cluster.answers(tmp_path, prompts, cancelled=cancelled)
    expected = greedy_all(load_oracle(small_model), prompts, ANSWER)
    for number, (answer, tokens) in enumerate(zip(answers, expected, strict=True)):
        assert answer == (tokens[: len(answer)] if number in cancelled else tokens)
        assert answer
    until(lambda: cluster.held()[:2] == (0, {0}))


def test_gateways_share_the_memory_of_what_they_import(cluster: Cluster) -> None:
    """They share above all torch, which they do without. By now they have served requests over gRPC."""
    gateways = [
        pid for host in range(3) for pid in cluster.hosts.pids(host) if process_name(pid).startswith("gateway.")
    ]
    assert len(gateways) >= 3
    assert max(_own_bytes(pid) for pid in gateways) < OWN_BYTES


def test_nothing_but_the_gateways_answers_a_stranger(cluster: Cluster, tmp_path: Path) -> None:
    assert nobody_answers(cluster, tmp_path) == 3  # of each gateway, for those of other hosts
    assert [address.rpartition(":")[0] for address in cluster.metrics] == cluster.hosts.addresses[:3]
    for address in cluster.metrics:
        assert "tandem:islands " in cluster.scraped(address)


def test_no_prompt_crosses_the_network_in_the_open(cluster: Cluster, small_model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(small_model)
    assert tokenizer is not None
    prompts = [f"{secrets.token_hex(12)} is secret {number}" for number in range(24)]
    texts = [prompt.encode() for prompt in prompts]
    tokens = [prompt_to_bytes(np.array(tokenizer.encode(prompt))) for prompt in prompts]
    computed = cluster.held()[2]
    with cluster.captured(tmp_path, [*texts, *tokens]) as seen:
        assert all(cluster.answers(tmp_path, prompts))
    assert cluster.held()[2] > computed
    assert not any(seen["found"])
    assert not seen["missed"]
    workers = [worker for host, workers in cluster.islands().values() for worker in workers]
    abroad = {worker for worker in workers if not worker.startswith(f"{cluster.hosts.addresses[0]}:")}
    assert {cluster.address, *abroad} <= seen["frames"].keys()
    with cluster.captured(tmp_path, [*texts, *tokens]) as seen:
        cluster.send_openly([*texts, *tokens])
    assert all(seen["found"])  # so the capture would have shown them


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_rays_gcs_serving_goes_on_and_what_is_lost_is_started_once_it_is_back(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    """A process host belongs to Ray, and needs the GCS. A worker is forked for its process host, and does not."""
    cluster.scale("--islands", "3")  # one on each host
    before, made = cluster.info(), cluster.hosts
    assert made.addresses[1] in {host for host, _ in cluster.islands().values()}
    process_hosts = [pid for pid in made.pids(1) if process_name(pid) == "ray::ProcessHos"]
    (worker,) = (pid for pid in made.pids(1) if process_name(pid).startswith("decode (PE"))
    process_host = process_host_of(worker, process_hosts)
    prompts = [random_prompt(9 + 5 * number, 700 + number) for number in range(8)]
    expected = greedy_all(load_oracle(small_model), prompts, ANSWER)
    made.end_gcs()
    until(lambda: cluster.info()["starts_nothing"])
    assert "has lost its GCS: what runs serves on, and nothing is started until it is back" in cluster.said()
    with cluster.going_on([cluster.address]) as said:
        (decode, *_) = (pid for pid in made.pids(0) if process_name(pid).startswith("decode (PE"))
        os.kill(decode, signal.SIGKILL)
    assert len(said["tokens"]) == 1500
    assert "nothing is started until it is back" in cluster.refused("scale", "--islands", "4")
    os.kill(process_host, signal.SIGKILL)
    assert cluster.answers(tmp_path, prompts) == expected
    made.start_gcs()
    until(lambda: not cluster.info()["starts_nothing"])
    until(lambda: all(workers for _, workers in cluster.islands().values()), READY_SECONDS)
    assert cluster.answers(tmp_path, prompts) == expected
    after = cluster.info()
    assert [one["name"] for one in after["islands"]] == [one["name"] for one in before["islands"]]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_islands_of_a_lost_host_go_to_another_and_its_gateway_comes_back_with_it(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    before = cluster.islands()
    lost = cluster.hosts.addresses[2]
    (name,) = (name for name, (host, _) in before.items() if host == lost)
    here, lost_gateway = cluster.addresses[0], cluster.addresses[2]
    with cluster.going_on([lost_gateway, here]) as said:
        cluster.hosts.lose(2)
    assert said["address"] == here
    with cluster.going_on([here]) as undisturbed:
        pass
    assert said["tokens"] == undisturbed["tokens"]
    assert cluster.gateways() == cluster.hosts.addresses[:2]
    until(lambda: cluster.islands()[name][1] and cluster.islands()[name][0] != lost, READY_SECONDS)
    host, _ = cluster.islands()[name]
    assert host in cluster.hosts.addresses[:2]
    prompts = [random_prompt(9 + 5 * number, 100 + number) for number in range(40)]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(cluster.answers, tmp_path, prompts)
        cluster.scale("--islands", "2")
        assert answers.result() == greedy_all(load_oracle(small_model), prompts, ANSWER)
    assert len(cluster.islands()) == 2
    cluster.hosts.start_ray(2)
    until(lambda: cluster.gateways() == cluster.hosts.addresses[:3], READY_SECONDS)
    back = replace(cluster, addresses=[lost_gateway])
    assert back.answers(tmp_path, prompts[:2]) == greedy_all(load_oracle(small_model), prompts[:2], ANSWER)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_without_the_head_and_its_launcher_others_serve_on_until_their_lease_ends_and_leave_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    """This is the last test of this cluster. Nobody is left who could tell gateways and islands of other hosts to
    end."""
    made = cluster.hosts
    if {host for host, _ in cluster.islands().values()} == {made.addresses[0]}:
        cluster.scale("--islands", "3")
    assert {host for host, _ in cluster.islands().values()} & set(made.addresses[1:3])
    ours = {pid for host in (1, 2) for pid in made.pids(host) if process_name(pid).startswith(OF_CLUSTER)}
    assert len(ours) >= 6  # process hosts, gateways, and an island's workers
    with cluster.going_on(cluster.addresses[1:], "ends") as clients:
        lost_at = time.monotonic()
        made.lose(0)
    for said in clients["each"]:
        assert said["same"]
        assert sum(at > lost_at for at in said["times"]) > 1
        assert said["ended"].startswith("UNAVAILABLE: the cluster ends: its launcher or its Ray was lost"), said
    until(lambda: not any(process_name(pid).startswith(OF_CLUSTER) for host in (1, 2) for pid in made.pids(host)))
