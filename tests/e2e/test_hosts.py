"""A cluster of three hosts, which are network namespaces of this machine, and a client on a fourth."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from tandem.cluster.processes.process_tree import descendants
from tandem.cluster.supervision.authority import Authority
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.workers.wire.messages import prompt_to_bytes
from tests.support.client_requests import GREEDY
from tests.support.hosts import COMMAND_SECONDS, Hosts, can_make_hosts, hosts, process_name
from tests.support.oracle import greedy_all, load_oracle, random_prompt
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root and `ip netns`")
CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "local.yaml"
TANDEM = [sys.executable, "-m", "tandem.cluster.cli"]
TOKEN = secrets.token_hex(16)
OUTPUT = 12
READY_SECONDS = 240
OURS = ("prefill (PE", "decode (PE", "gateway.")  # by the beginnings of their names; the launcher's port is Ray's
GATEWAYS: dict[str, object] = {"gateway.nodes": "all", "gateway.port": 50061}
OF_CLUSTER = (*OURS, "ray::ProcessHos", "tandem: ")
ISLANDS: dict[str, object] = {"num_islands": 2, "recovery.partition_seconds": 4}
OVER_HOSTS = {"island.transport": "tcp", "island.span_hosts": "true", "island.verify_kv": "true"}


@dataclass
class Cluster:
    hosts: Hosts
    addresses: list[str]  # of the gateways, the first host's first
    ca: Path
    token_file: Path
    launcher: "subprocess.Popen[str]"
    log: Path
    metrics: list[str]  # the addresses of metrics.port; none without it

    @property
    def address(self) -> str:
        """Of the first host's gateway."""
        return self.addresses[0]

    def islands(self) -> dict[str, tuple[str, list[str]]]:
        """The host of each island, and its workers' addresses."""
        return {
            island["name"]: (island["host"], [worker["address"] for worker in island["workers"]])
            for island in self.info()["islands"]
        }

    def info(self) -> dict[str, Any]:
        return json.loads(self._run(*TANDEM, "status", "--address", self.address, "--json"))

    def scale(self, *wanted: str) -> None:
        self._run(*TANDEM, "scale", "--address", self.address, *wanted)

    def said(self) -> str:
        """What `tandem status` prints."""
        return " ".join(self._run(*TANDEM, "status", "--address", self.address).split())

    def refused(self, *command: str) -> str:
        """What a command says that fails."""
        done = self._call(*TANDEM, command[0], "--address", self.address, *command[1:])
        assert done.returncode == 1, done.stdout
        return done.stderr

    def held(self) -> tuple[int, set[int], int]:
        """Requests at the gateway; pages that each worker misses; and prompt tokens that all have computed so far."""
        info = self.info()
        workers = [worker for island in info["islands"] for worker in island["workers"]]
        missing = {worker["num_pages"] - worker["free_pages"] for worker in workers}
        return info.get("active", 0), missing, sum(int(worker["counters"]["prompt_tokens"]) for worker in workers)

    def answers(
        self,
        folder: Path,
        prompts: Sequence[list[int] | str],
        sampling: Mapping[str, object] | None = None,
        cancelled: Sequence[int] = (),
    ) -> list[list[int]]:
        """Of a client on the last host; sampling: greedily without. It goes away early from requests `cancelled`."""
        asked = folder / "asked.json"
        asked.write_text(json.dumps([prompts, sampling or GREEDY | {"max_tokens": OUTPUT}, list(cancelled)]))
        client = [sys.executable, "-m", "tests.e2e.client_on_a_host", self.address, str(self.ca), str(asked)]
        return json.loads(self._run(*client))

    @property
    def environment(self) -> dict[str, str]:
        """Of clients."""
        paths = {"TANDEM_TOKEN_FILE": str(self.token_file), "TANDEM_TLS_CA": str(self.ca)}
        return self.hosts.environment | paths | {"TOKEN": TOKEN}

    def gateways(self) -> list[str]:
        """The hosts whose gateways serve."""
        return sorted(gateway["host"] for gateway in self.info()["gateways"] if gateway["pid"])

    def done(self, task: str) -> Any:
        """What a client of all gateways says, see several_gateways_on_a_host."""
        return json.loads(self._run(*self._several(task, self.addresses)))

    @contextmanager
    def going_on(self, addresses: Sequence[str], task: str = "goes_on") -> Iterator[dict[str, Any]]:
        """A client of these gateways whose request has begun when the block does. What it says is there after it: a
        task's own words, or under `each` those of each gateway."""
        command = self.hosts.command(3, *self._several(task, addresses))
        said: dict[str, Any] = {}
        with subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "begun\n"
            yield said
            words = json.loads(client.communicate(timeout=READY_SECONDS)[0])
            said |= words if isinstance(words, dict) else {"each": words}

    def _several(self, task: str, addresses: Sequence[str]) -> list[str]:
        module = [sys.executable, "-m", "tests.e2e.several_gateways_on_a_host"]
        return [*module, task, ",".join(addresses), str(self.ca)]

    def scraped(self, address: str) -> str:
        """What a server of metrics tells a monitor on the last host that has the token."""
        ask = "import ssl, sys, urllib.request as u; url, ca, token = sys.argv[1:]\n"
        ask += "asked = u.Request(url, headers={'authorization': 'Bearer ' + token})\n"
        ask += "print(u.urlopen(asked, context=ssl.create_default_context(cafile=ca)).read().decode())"
        return self._run(sys.executable, "-c", ask, f"https://{address}/metrics", str(self.ca), TOKEN)

    def heard_by_strangers(self, folder: Path, addresses: Sequence[str]) -> list[list[bool | int | None]]:
        """How servers answer a stranger on the last host, see stranger_on_a_host; its certificate is another
        cluster's."""
        foreign, pair = Authority("another").gateway(), folder / "foreign.pem"
        pair.write_bytes(foreign.certificate + foreign.key)
        stranger = [sys.executable, "-m", "tests.e2e.stranger_on_a_host", str(pair), *addresses]
        return json.loads(self._run(*stranger))

    @contextmanager
    def captured(self, folder: Path, needles: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        """All that crosses the first host's network inside the block; what was seen is there after it."""
        listed, seen = folder / "needles", {}
        listed.write_text("\n".join(needle.hex() for needle in needles))
        command = self.hosts.command(0, sys.executable, "-m", "tests.e2e.capture_on_a_host", str(listed))
        environment = self.hosts.environment
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as capture:
            assert capture.stdout is not None
            assert capture.stdout.readline() == "ready\n"
            try:
                yield seen
            finally:
                said, _ = capture.communicate(timeout=READY_SECONDS)
        seen |= json.loads(said)

    def send_openly(self, messages: Sequence[bytes]) -> None:
        """From the last host to the first one, without TLS."""
        listen = "import socket; s = socket.create_server(('', 9)); print('ready', flush=True); c = s.accept()[0]\n"
        command = self.hosts.command(0, sys.executable, "-c", f"{listen}while c.recv(1 << 16): pass")
        with subprocess.Popen(command, env=self.hosts.environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            send = "import socket, sys; c = socket.create_connection((sys.argv[1], 9))\n"
            send += "for message in sys.argv[2:]: c.sendall(bytes.fromhex(message))"
            hexed = [message.hex() for message in messages]
            self._run(sys.executable, "-c", send, self.hosts.addresses[0], *hexed)

    def _run(self, *command: str) -> str:
        done = self._call(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _call(self, *command: str) -> "subprocess.CompletedProcess[str]":
        run, options = self.hosts.command(3, *command), {"timeout": COMMAND_SECONDS, "check": False}
        return subprocess.run(run, env=self.environment, capture_output=True, text=True, **options)


def _eventually(holds: Callable[[], object]) -> None:
    """As until(), for what takes the start of processes that import."""
    deadline = time.monotonic() + READY_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {READY_SECONDS} s"
        time.sleep(0.5)


def _forks(process_host: int, name: str) -> bool:
    """Whether a process below it has a name that begins so."""
    return any(process_name(pid).startswith(name) for pid, _ in descendants(process_host))


def nobody_answers(cluster: Cluster, folder: Path) -> int:
    """But the gateways and their servers of metrics, and they only over TLS; without a token they serve nobody. By
    default such a server is on loopback. How many ports beside the workers' do not answer."""
    workers = {worker for _, workers in cluster.islands().values() for worker in workers}
    listening = [cluster.hosts.listening(host, OURS) for host in range(3)]
    open_ports = {address for addresses in listening for address in addresses}
    public = [address for address in cluster.metrics if not address.startswith("127.")]
    assert {*cluster.addresses, *public} <= open_ports
    private = open_ports - {*cluster.addresses, *public}
    assert private >= workers
    here = cluster.hosts.addresses[0]
    hidden = [address.replace("127.0.0.1", here) for address in cluster.metrics if address not in public]
    heard = cluster.heard_by_strangers(folder, [*cluster.addresses, *public, *private, *hidden])
    expected = [[False, True, None, None]] * len(cluster.addresses) + [[False, False, None, 401]] * len(public)
    assert heard == expected + [[False, False, None, None]] * (len(private) + len(hidden))
    return len(private - workers)


@pytest.fixture(scope="module")
def joined_hosts() -> Iterator[Hosts]:
    """Three in one Ray, whose GCS stores what it knows, and one for clients."""
    with hosts(4, remembers=True) as made:
        made.start_ray(0)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(made.start_ray, (1, 2)))
        yield made


@contextmanager
def running(made: Hosts, folder: Path, model: Path, settings: Mapping[str, object]) -> Iterator[Cluster]:
    """A cluster whose gateway is on the first host. settings: beside those that all have."""
    authority = trustme.CA()
    certificate = authority.issue_cert(*made.addresses)
    paths = {name: folder / name for name in ("ca.pem", "cert.pem", "key.pem", "token")}
    authority.cert_pem.write_to_path(str(paths["ca.pem"]))
    certificate.cert_chain_pems[0].write_to_path(str(paths["cert.pem"]))
    certificate.private_key_pem.write_to_path(str(paths["key.pem"]))
    paths["token"].write_text(TOKEN)
    for private in ("key.pem", "token"):
        paths[private].chmod(0o600)
    together = {
        "name": f"hosts-{secrets.token_hex(3)}",
        "cache.num_pages": 128,
        "gateway.host": made.addresses[0],
        "gateway.port": 0,
        "gateway.processes": 1,
        "island.threads_per_worker": 1,
        "security.token_file": paths["token"],
        "security.tls_cert": paths["cert.pem"],
        "security.tls_key": paths["key.pem"],
        **settings,
    }
    command = [*TANDEM, "up", str(CONFIG), "--model", str(model), "--address", made.ray]
    for key, value in together.items():
        command += ["--set", f"{key}={value}"]
    with (folder / "log").open("w") as log:
        run = made.command(0, *command)
        process = subprocess.Popen(run, env=made.environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"ready grpc=(\S+:\d+)(?: metrics=(\S+:\d+))?\n", process.stdout.readline())
        assert found, (folder / "log").read_text()
        metrics = found[2].split(",") if found[2] else []
        yield Cluster(made, found[1].split(","), paths["ca.pem"], paths["token"], process, folder / "log", metrics)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=READY_SECONDS)


@pytest.fixture(scope="module")
def cluster(joined_hosts: Hosts, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    settings = GATEWAYS | ISLANDS | {"metrics.port": 50062, "metrics.host": joined_hosts.addresses[0]}
    with running(joined_hosts, tmp_path_factory.mktemp("hosts"), small_model, settings) as cluster:
        yield cluster


@pytest.mark.timeout(300)
def test_an_island_over_several_hosts_serves_a_client_of_another(
    joined_hosts: Hosts, small_model: Path, tmp_path: Path
) -> None:
    with running(joined_hosts, tmp_path, small_model, OVER_HOSTS | {"metrics.port": 0}) as spanning:
        ((host, workers),) = spanning.islands().values()
        first, second = (worker.rpartition(":")[0] for worker in workers)
        assert first != second
        assert host == f"{first}, {second}"
        assert [address.startswith("127.0.0.1:") for address in spanning.metrics] == [True]
        nobody_answers(spanning, tmp_path)
        spanning.scale("--decode", "2")
        ((host, workers),) = spanning.islands().values()
        assert sorted(host.split(", ")) == sorted({worker.rpartition(":")[0] for worker in workers})
        assert len(workers) == 3
        prompts = [random_prompt(5 + 11 * number, number) for number in range(12)]
        assert spanning.answers(tmp_path, prompts) == greedy_all(load_oracle(small_model), prompts, OUTPUT)
        spanning.scale("--decode", "1")
        assert [len(workers) for _, workers in spanning.islands().values()] == [2]


def test_islands_are_spread_over_the_hosts_and_serve_a_client_of_another(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    assert len({host for host, _ in cluster.islands().values()}) == 2
    replace(cluster, addresses=cluster.addresses[1:]).scale("--islands", "3")  # by another host's gateway
    islands = cluster.islands()
    assert sorted(host for host, _ in islands.values()) == cluster.hosts.addresses[:3]
    for host, workers in islands.values():
        assert len(workers) == 2
        assert all(worker.startswith(f"{host}:") for worker in workers)
    prompts = [random_prompt(5 + 7 * number, number) for number in range(24)]
    assert cluster.answers(tmp_path, prompts) == greedy_all(load_oracle(small_model), prompts, OUTPUT)


def test_any_gateway_serves_any_island_and_takes_a_request_over_from_another_host(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    assert cluster.gateways() == sorted(address.rpartition(":")[0] for address in cluster.addresses)
    assert cluster.gateways() == cluster.hosts.addresses[:3]
    prompts = [random_prompt(5 + 3 * number, 300 + number) for number in range(6)]
    expected = greedy_all(load_oracle(small_model), prompts, OUTPUT)
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
    expected = greedy_all(load_oracle(small_model), prompts, OUTPUT)
    for number, (answer, tokens) in enumerate(zip(answers, expected, strict=True)):
        assert answer == (tokens[: len(answer)] if number in cancelled else tokens)
        assert answer
    until(lambda: cluster.held()[:2] == (0, {0}))


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


@pytest.mark.timeout(300)
def test_without_rays_gcs_serving_goes_on_and_what_is_lost_is_started_once_it_is_back(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    """A process host is Ray's, and needs the GCS. A worker is forked by its process host, and does not."""
    cluster.scale("--islands", "3")  # one on each host
    before, made = cluster.info(), cluster.hosts
    assert made.addresses[1] in {host for host, _ in cluster.islands().values()}
    (process_host,) = (pid for pid in made.pids(1) if process_name(pid) == "ray::ProcessHos" and _forks(pid, "decode"))
    prompts = [random_prompt(9 + 5 * number, 700 + number) for number in range(8)]
    expected = greedy_all(load_oracle(small_model), prompts, OUTPUT)
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
    _eventually(lambda: all(workers for _, workers in cluster.islands().values()))
    assert cluster.answers(tmp_path, prompts) == expected
    after = cluster.info()
    assert [one["name"] for one in after["islands"]] == [one["name"] for one in before["islands"]]


@pytest.mark.timeout(300)
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
    _eventually(lambda: cluster.islands()[name][1] and cluster.islands()[name][0] != lost)
    host, _ = cluster.islands()[name]
    assert host in cluster.hosts.addresses[:2]
    prompts = [random_prompt(9 + 5 * number, 100 + number) for number in range(40)]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(cluster.answers, tmp_path, prompts)
        cluster.scale("--islands", "2")
        assert answers.result() == greedy_all(load_oracle(small_model), prompts, OUTPUT)
    assert len(cluster.islands()) == 2
    cluster.hosts.start_ray(2)
    until(lambda: cluster.gateways() == cluster.hosts.addresses[:3])
    back = replace(cluster, addresses=[lost_gateway])
    assert back.answers(tmp_path, prompts[:2]) == greedy_all(load_oracle(small_model), prompts[:2], OUTPUT)


@pytest.mark.timeout(300)
def test_without_the_head_and_its_launcher_others_serve_on_until_their_lease_ends_and_leave_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The last test of this cluster. Nobody is left who could tell gateways and islands of other hosts to end."""
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
