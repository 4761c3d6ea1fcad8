"""A cluster of three hosts, which are network namespaces of this machine, and a client on a fourth."""

import json
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.client_requests import GREEDY
from tests.support.hosts import Hosts, can_make_hosts, hosts
from tests.support.oracle import greedy_all, load_oracle, random_prompt

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root and `ip netns`")
CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "local.yaml"
TANDEM = [sys.executable, "-m", "tandem.cluster.cli"]
TOKEN = secrets.token_hex(16)
OUTPUT = 12
READY_SECONDS = 120
OVER_HOSTS = {"island.transport": "tcp", "island.span_hosts": "true", "island.verify_kv": "true"}
PROBE = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 5) as connection:
        connection.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n\\0\\0\\0\\4\\0\\0\\0\\0\\0")
        connection.settimeout(5)
        try:
            print(connection.recv(1000)[:1].hex() or "closed")
        except OSError as error:
            print("closed")
"""


@dataclass
class Cluster:
    hosts: Hosts
    address: str  # of the gateway, on the first host
    ca: Path
    token_file: Path

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

    def answers(
        self, folder: Path, prompts: list[list[int]], sampling: Mapping[str, object] | None = None
    ) -> list[list[int]]:
        """Of a client on the last host; sampling: greedily without."""
        asked = folder / "asked.json"
        asked.write_text(json.dumps([prompts, sampling or GREEDY | {"max_tokens": OUTPUT}]))
        client = [sys.executable, "-m", "tests.e2e.client_on_a_host", self.address, str(self.ca), str(asked)]
        return json.loads(self._run(*client))

    def probe(self, addresses: list[str]) -> list[str]:
        """What a stranger on the last host hears."""
        return self._run(sys.executable, "-c", PROBE, *addresses).split()

    def _run(self, *command: str) -> str:
        environment = self.hosts.environment | {
            "TOKEN": TOKEN,
            "TANDEM_TOKEN_FILE": str(self.token_file),
            "TANDEM_TLS_CA": str(self.ca),
        }
        done = subprocess.run(
            self.hosts.command(3, *command), env=environment, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def joined_hosts() -> Iterator[Hosts]:
    """Three in one Ray, and one for clients."""
    with hosts(4) as made:
        made.start_ray(0)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(made.start_ray, (1, 2)))
        yield made


@contextmanager
def running(made: Hosts, folder: Path, model: Path, settings: Mapping[str, object]) -> Iterator[Cluster]:
    """A cluster whose gateway is on the first host. settings: beside those that all have."""
    authority = trustme.CA()
    certificate = authority.issue_cert(made.addresses[0])
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
        "gateway.processes": 1,
        "island.threads_per_worker": 1,
        "security.token_file": paths["token"],
        "security.tls_cert": paths["cert.pem"],
        "security.tls_key": paths["key.pem"],
        **settings,
    }
    command = [*TANDEM, "up", str(CONFIG), "--model", str(model), "--grpc-port", "0", "--address", made.ray]
    for key, value in together.items():
        command += ["--set", f"{key}={value}"]
    with (folder / "log").open("w") as log:
        run = made.command(0, *command)
        process = subprocess.Popen(run, env=made.environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"ready grpc=(\S+:\d+)\n", process.stdout.readline())
        assert found, (folder / "log").read_text()
        yield Cluster(made, found[1], paths["ca.pem"], paths["token"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=READY_SECONDS)


@pytest.fixture(scope="module")
def cluster(joined_hosts: Hosts, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(joined_hosts, tmp_path_factory.mktemp("hosts"), small_model, {"num_islands": 2}) as cluster:
        yield cluster


@pytest.mark.timeout(300)
def test_an_island_over_several_hosts_serves_a_client_of_another(
    joined_hosts: Hosts, small_model: Path, tmp_path: Path
) -> None:
    with running(joined_hosts, tmp_path, small_model, OVER_HOSTS) as spanning:
        ((host, workers),) = spanning.islands().values()
        first, second = (worker.rpartition(":")[0] for worker in workers)
        assert first != second
        assert host == f"{first}, {second}"
        assert set(spanning.probe(workers)) <= {"closed", "15"}
        spanning.scale("--decode", "2")
        ((host, workers),) = spanning.islands().values()
        assert sorted(host.split(", ")) == sorted({worker.rpartition(":")[0] for worker in workers})
        assert len(workers) == 3
        prompts = [random_prompt(5 + 11 * number, number) for number in range(12)]
        assert spanning.answers(tmp_path, prompts) == greedy_all(load_oracle(small_model), prompts, OUTPUT)


def test_islands_are_spread_over_the_hosts_and_serve_a_client_of_another(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    assert len({host for host, _ in cluster.islands().values()}) == 2
    cluster.scale("--islands", "3")
    islands = cluster.islands()
    assert sorted(host for host, _ in islands.values()) == cluster.hosts.addresses[:3]
    for host, workers in islands.values():
        assert len(workers) == 2
        assert all(worker.startswith(f"{host}:") for worker in workers)
    prompts = [random_prompt(5 + 7 * number, number) for number in range(24)]
    assert cluster.answers(tmp_path, prompts) == greedy_all(load_oracle(small_model), prompts, OUTPUT)


def test_a_stranger_on_the_network_hears_no_worker(cluster: Cluster) -> None:
    """A server without TLS would begin with its settings, a frame that begins with 0."""
    workers = [worker for _, workers in cluster.islands().values() for worker in workers]
    assert {heard for heard in cluster.probe(workers)} <= {"closed", "15"}  # 15: a TLS alert


def test_the_islands_of_a_lost_host_go_to_another_and_islands_are_given_back(
    cluster: Cluster, small_model: Path, tmp_path: Path
) -> None:
    before = cluster.islands()
    lost = cluster.hosts.addresses[2]
    (name,) = (name for name, (host, _) in before.items() if host == lost)
    cluster.hosts.lose(2)
    deadline = time.monotonic() + READY_SECONDS
    while True:
        host, workers = cluster.islands()[name]
        if workers and host != lost:
            break
        assert time.monotonic() < deadline, "the island was not started again"
        time.sleep(0.5)
    assert host in cluster.hosts.addresses[:2]
    prompts = [random_prompt(9 + 5 * number, 100 + number) for number in range(40)]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(cluster.answers, tmp_path, prompts)
        cluster.scale("--islands", "1")
        assert answers.result() == greedy_all(load_oracle(small_model), prompts, OUTPUT)
    assert len(cluster.islands()) == 1
