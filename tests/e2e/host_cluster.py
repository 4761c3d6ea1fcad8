"""A cluster that `tandem up` runs on network namespaces of this machine, and its clients on the last one."""

import json
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from select import select
from threading import Lock
from typing import Any

import trustme

from tandem.cluster.supervision.authority import Authority
from tests.support.client_requests import GREEDY
from tests.support.hosts import COMMAND_SECONDS, Hosts

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "local.yaml"
TANDEM = [sys.executable, "-m", "tandem.cluster.cli"]
TOKEN = secrets.token_hex(16)
ANSWER = 12  # tokens, of those without other parameters
READY_SECONDS = 240
OURS = ("prefill (PE", "decode (PE", "gateway.")  # by the beginnings of their names; the launcher's port is Ray's
OVER_HOSTS = {"island.transport": "tcp", "island.span_hosts": "true", "island.verify_kv": "true"}


class Commands:
    """Runs commands of `tandem` on the last host, for any cluster, one at a time. From any thread."""

    def __init__(self, hosts: Hosts, environment: Mapping[str, str]) -> None:
        command = hosts.command(3, sys.executable, "-m", "tests.e2e.commands_on_a_host")
        self._lock = Lock()
        self._process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Returns the exit code, and the output on stdout and stderr. TimeoutError when it takes too long."""
        asked, answered = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answered is not None
        with self._lock:
            print(json.dumps(arguments), file=asked, flush=True)
            if not select([answered], [], [], COMMAND_SECONDS)[0]:
                raise TimeoutError(f"`tandem {' '.join(arguments)}` took more than {COMMAND_SECONDS} s")
            return json.loads(answered.readline())

    def close(self) -> None:
        """Ends the process, even if a command hangs."""
        self._process.kill()
        self._process.communicate()


@dataclass
class Cluster:
    hosts: Hosts
    addresses: list[str]  # of the gateways, the first host's first
    ca: Path
    token_file: Path
    launcher: "subprocess.Popen[str]"
    log: Path
    metrics: list[str]  # the addresses of metrics.port; none without it
    commands: Commands

    @property
    def address(self) -> str:
        """The address of the first host's gateway."""
        return self.addresses[0]

    def islands(self) -> dict[str, tuple[str, list[str]]]:
        """Returns the host of each island, and its workers' addresses."""
        return {
            island["name"]: (island["host"], [worker["address"] for worker in island["workers"]])
            for island in self.info()["islands"]
        }

    def info(self) -> dict[str, Any]:
        return json.loads(self._done("status", "--json"))

    def scale(self, *wanted: str) -> None:
        self._done("scale", *wanted)

    def said(self) -> str:
        """Returns the output of `tandem status`."""
        return " ".join(self._done("status").split())

    def refused(self, *command: str) -> str:
        """Returns the error output of a command that fails."""
        code, out, err = self._tandem(*command)
        assert code == 1, out
        return err

    def held(self) -> tuple[int, set[int], int]:
        """Returns the requests at the gateway, the pages that each worker misses, and the prompt tokens that all have
        computed so far."""
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
        """Returns the answers to a client on the last host; sampling: greedily without. It goes away early from
        requests `cancelled`."""
        asked = folder / "asked.json"
        asked.write_text(json.dumps([prompts, sampling or GREEDY | {"max_tokens": ANSWER}, list(cancelled)]))
        client = [sys.executable, "-m", "tests.e2e.client_on_a_host", self.address, str(self.ca), str(asked)]
        return json.loads(self._run(*client))

    @property
    def environment(self) -> dict[str, str]:
        return _environment(self.hosts, self.token_file, self.ca)

    def gateways(self) -> list[str]:
        """Lists the hosts whose gateways serve."""
        return sorted(gateway["host"] for gateway in self.info()["gateways"] if gateway["pid"])

    def done(self, task: str) -> Any:
        """Returns the result of a client of all gateways, see several_gateways_on_a_host."""
        return json.loads(self._run(*self._several(task, self.addresses)))

    @contextmanager
    def going_on(self, addresses: Sequence[str], task: str = "goes_on") -> Iterator[dict[str, Any]]:
        """Runs a client of these gateways, whose request has begun when the block begins. Its results are there after
        the block: a task's own, or under `each` those of each gateway."""
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
        """Returns the text that a server of metrics gives a monitor on the last host that has the token."""
        ask = "import ssl, sys, urllib.request as u; url, ca, token = sys.argv[1:]\n"
        ask += "asked = u.Request(url, headers={'authorization': 'Bearer ' + token})\n"
        ask += "print(u.urlopen(asked, context=ssl.create_default_context(cafile=ca)).read().decode())"
        return self._run(sys.executable, "-c", ask, f"https://{address}/metrics", str(self.ca), TOKEN)

    def heard_by_strangers(self, folder: Path, addresses: Sequence[str]) -> list[list[bool | int | None]]:
        """Returns how servers answer a stranger on the last host, see stranger_on_a_host; its certificate is another
        cluster's."""
        foreign, pair = Authority("another").gateway(), folder / "foreign.pem"
        pair.write_bytes(foreign.certificate + foreign.key)
        stranger = [sys.executable, "-m", "tests.e2e.stranger_on_a_host", str(pair), *addresses]
        return json.loads(self._run(*stranger))

    @contextmanager
    def captured(self, folder: Path, needles: Sequence[bytes]) -> Iterator[dict[str, Any]]:
        """Captures all frames of the first host's network inside the block; the counts are there after it."""
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
        """Sends messages from the last host to the first one, without TLS."""
        listen = "import socket; s = socket.create_server(('', 9)); print('ready', flush=True); c = s.accept()[0]\n"
        command = self.hosts.command(0, sys.executable, "-c", f"{listen}while c.recv(1 << 16): pass")
        with subprocess.Popen(command, env=self.hosts.environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            send = "import socket, sys; c = socket.create_connection((sys.argv[1], 9))\n"
            send += "for message in sys.argv[2:]: c.sendall(bytes.fromhex(message))"
            hexed = [message.hex() for message in messages]
            self._run(sys.executable, "-c", send, self.hosts.addresses[0], *hexed)

    def _done(self, *command: str) -> str:
        """Returns the output of a command that succeeds."""
        code, out, err = self._tandem(*command)
        assert code == 0, err
        return out

    def _tandem(self, name: str, *rest: str) -> tuple[int, str, str]:
        return self.commands.run(name, "--address", self.address, *rest)

    def _run(self, *command: str) -> str:
        run, options = self.hosts.command(3, *command), {"timeout": COMMAND_SECONDS, "check": False}
        done = subprocess.run(run, env=self.environment, capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _environment(hosts: Hosts, token_file: Path, ca: Path) -> dict[str, str]:
    """Makes the environment of clients."""
    return hosts.environment | {"TANDEM_TOKEN_FILE": str(token_file), "TANDEM_TLS_CA": str(ca), "TOKEN": TOKEN}


def nobody_answers(cluster: Cluster, folder: Path) -> int:
    """Checks that only the gateways and their servers of metrics answer, over TLS alone; without a token they serve
    nobody. By default a server of metrics is on loopback. Returns how many ports besides the workers' do not answer."""
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


@contextmanager
def running(made: Hosts, folder: Path, model: Path, settings: Mapping[str, object]) -> Iterator[Cluster]:
    """Runs a cluster whose gateway is on the first host. settings: besides those that all have."""
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
    commands = Commands(made, _environment(made, paths["token"], paths["ca.pem"]))
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"ready grpc=(\S+:\d+)(?: metrics=(\S+:\d+))?\n", process.stdout.readline())
        assert found, (folder / "log").read_text()
        metrics = found[2].split(",") if found[2] else []
        addresses, files = found[1].split(","), (paths["ca.pem"], paths["token"])
        yield Cluster(made, addresses, *files, process, folder / "log", metrics, commands)
    finally:
        commands.close()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=READY_SECONDS)
