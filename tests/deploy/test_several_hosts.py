"""The files for several hosts, run on network namespaces: their commands start a cluster that serves."""

import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
import trustme

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.deploy import manifest
from tests.deploy.known import DEPLOY
from tests.deploy.on_hosts import STARTS, Start
from tests.support.client_requests import GREEDY
from tests.support.hosts import Hosts, can_make_hosts, hosts
from tests.support.oracle import greedy_all, load_oracle, random_prompt

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="needs root and `ip netns`")
SECONDS = 240.0
RESTART_SECONDS = 5.0
OUTPUT = 6
CLIENT = 2  # the host
FIREWALL = (DEPLOY / "firewall" / "hosts.nft").read_text(encoding="utf-8")
# What differs from the hosts of the files: processors and no GPU, and a certificate of the test's.
HERE = {
    "TANDEM_ISLAND__DEVICE": "cpu",
    "TANDEM_ISLAND__TRANSPORT": "shared_memory",
    "TANDEM_ISLAND__THREADS_PER_WORKER": "1",
    "TANDEM_CACHE__NUM_PAGES": "64",
    "TANDEM_GATEWAY__PROCESSES": "1",
    "TANDEM_GATEWAY__DRAIN_SECONDS": "1.0",
}
ASK = """
import sys, httpx
for address in sys.argv[1].split(","):
    for path in ("/ready", "/health", "/metrics"):
        print(httpx.get(f"https://{address}{path}", verify=False, trust_env=False).status_code)
"""
CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

def opens(address):
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 3).close()
    except OSError:
        return False
    return True

with ThreadPoolExecutor(64) as pool:
    print(json.dumps(list(pool.map(opens, sys.argv[1:]))))
"""


@dataclass(frozen=True)
class Running:
    hosts: Hosts
    environ: dict[str, str]
    process: "subprocess.Popen[str]"
    addresses: dict[str, list[str]]  # by the names of the line `ready`, each host's
    ca: Path

    def on(self, host: int, *command: str) -> str:
        run = self.hosts.command(host, *command)
        done = subprocess.run(run, env=self.environ, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def answers(self, folder: Path, address: str, prompts: list[list[int]]) -> list[list[int]]:
        asked = folder / "asked.json"
        asked.write_text(json.dumps([prompts, GREEDY | {"max_tokens": OUTPUT, "ignore_eos": True}, []]))
        client = [sys.executable, "-m", "tests.e2e.client_on_a_host", address, str(self.ca), str(asked)]
        return json.loads(self.on(CLIENT, *client))

    def statuses(self) -> list[int]:
        """Returns the statuses of /ready, /health and /metrics on each host, without a token."""
        return [int(line) for line in self.on(CLIENT, sys.executable, "-c", ASK, self.monitors).split()]

    def opened(self, addresses: list[str]) -> set[str]:
        """Returns the addresses that accept a client's connection."""
        taken = json.loads(self.on(CLIENT, sys.executable, "-c", CONNECT, *addresses))
        return {address for address, one in zip(addresses, taken, strict=True) if one}

    @property
    def monitors(self) -> str:
        return ",".join(self.addresses["metrics"])


def certified(folder: Path, made: Hosts) -> dict[str, str]:
    authority = trustme.CA()
    issued = authority.issue_cert(*made.addresses, "localhost")
    certificate, key = folder / "tls.crt", folder / "tls.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.touch(mode=0o600)
    key.write_bytes(issued.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return {"TANDEM_SECURITY__TLS_CERT": str(certificate), "TANDEM_SECURITY__TLS_KEY": str(key)}


def token_of(how: str, folder: Path) -> dict[str, str]:
    """The manifest takes it from a Secret, the others from a file."""
    if how == "KubeRay":
        return {"TANDEM_SECURITY__API_KEY": manifest.SECRET}
    file = folder / "token"
    file.touch(mode=0o600)
    file.write_text(manifest.SECRET)
    return {"TANDEM_SECURITY__TOKEN_FILE": str(file)}


@contextmanager
def node(command: list[str], environ: dict[str, str], log: Path, *, stays: bool) -> Iterator[None]:
    """A host's Ray. Where its command stays, it is started again whenever it ends, as systemd or kubelet would."""
    if not stays:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield
        return
    over = Event()

    def keep() -> None:
        while not over.is_set():
            with log.open("a") as said, subprocess.Popen(command, env=environ, stdout=said, stderr=said) as process:
                while process.poll() is None and not over.wait(0.2):
                    pass
                process.kill()
            over.wait(RESTART_SECONDS)

    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(keep)
        try:
            yield
        finally:
            over.set()
    kept.result()


def opened_cluster(command: list[str], environ: dict[str, str], log: Path) -> "tuple[subprocess.Popen[str], str]":
    """`tandem up` and its line `ready`. It is started again where it ends with 1, as its service would be."""
    deadline = time.monotonic() + SECONDS
    while True:
        with log.open("a") as said:
            process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready "):
                return process, line
        assert process.wait() == 1, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(RESTART_SECONDS)


@contextmanager
def running(how: str, folder: Path, model: Path) -> Iterator[tuple[Running, Start]]:
    with hosts(3) as made, ExitStack() as held:
        home = made.home
        for host in range(3):
            subprocess.run(made.command(host, "ip", "route", "add", "default", "dev", "eth0"), check=True)
        start = STARTS[how](made, home)
        environ = made.environment | HERE | certified(folder, made)
        environ |= {"TANDEM_MODEL__PATH": str(model)} | token_of(how, folder)
        # A service's own folders; with two CPUs each, a host has room for any island.
        environ |= {"XDG_RUNTIME_DIR": str(home), "RAY_TMPDIR": str(home), "TOKEN": manifest.SECRET}
        log = folder / "log"
        nodes = [(0, start.head, start.head_environ), (1, start.worker, start.worker_environ)]
        for host, line, more in nodes:
            if line is not None:
                command = made.command(host, "bash", "-c", line)
                held.enter_context(node(command, environ | more, log, stays=start.stays))
        process, said = opened_cluster(made.command(0, "bash", "-c", start.up), environ | start.up_environ, log)
        try:
            found = dict(pair.split("=") for pair in said.split()[1:])
            addresses = {name: there.split(",") for name, there in found.items()}
            yield Running(made, environ, process, addresses, folder / "ca.pem"), start
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    make_checkpoint(folder, arch="llama", size="tiny", seed=3)
    return folder


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", STARTS)
def test_its_commands_start_a_cluster_of_two_hosts(how: str, tmp_path: Path, model: Path) -> None:
    with running(how, tmp_path, model) as (cluster, start):
        here = cluster.hosts.addresses[:2]
        assert [address.rpartition(":")[0] for address in cluster.addresses["grpc"]] == here
        prompts = [random_prompt(5 + 7 * number, number) for number in range(4)]
        expected = greedy_all(load_oracle(model), prompts, OUTPUT)
        for address in cluster.addresses["grpc"]:
            assert cluster.answers(tmp_path, address, prompts) == expected
        metrics = 200 if how == "KubeRay" else 401  # where it is public
        assert cluster.statuses() == [200, 200, metrics] * 2
        listening = [address for host in range(2) for address in cluster.hosts.listening(host, ("",))]
        assert cluster.opened(listening) == set(listening)
        if shutil.which("nft") is not None:
            closed_by_the_firewall(cluster, tmp_path, listening)
            assert cluster.answers(tmp_path, cluster.addresses["grpc"][1], prompts) == expected
        if start.down is None:
            cluster.process.send_signal(signal.SIGTERM)
        else:
            assert "stopped" in cluster.on(0, "bash", "-ec", start.down)
        assert cluster.process.wait(SECONDS) == 0
    if shutil.which("nft") is None:
        pytest.skip("all but the firewall passed; that needs nft")


def closed_by_the_firewall(cluster: Running, folder: Path, listening: list[str]) -> None:
    """A client reaches the gateways and nothing else, while hosts go on to reach each other."""
    made = cluster.hosts
    sets = {"hosts": made.addresses[:2], "clients": made.addresses[2:], "monitors": ["10.77.0.99"]}
    rules = FIREWALL
    for name, elements in sets.items():
        rules, count = re.subn(rf"(set {name} .*elements = ){{.*?}}", rf"\1{{ {', '.join(elements)} }}", rules)
        assert count == 1
    file = folder / f"rules-{secrets.token_hex(2)}"
    file.write_text(rules, encoding="utf-8")
    for host in range(2):
        cluster.on(host, "nft", "-f", str(file))
    clients = {*cluster.addresses["grpc"], *cluster.addresses["http"]}
    assert cluster.opened(listening) == clients
