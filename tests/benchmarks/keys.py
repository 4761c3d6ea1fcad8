"""Keys with limits under a storm: how much passes in any minute. Prints JSON.

Clients send several times what their keys allow, over HTTP and gRPC, to two gateways: two processes of one host, or
with --hosts one on each of two hosts (network namespaces, as root). Of each case and key:

    requests, tokens        the most that surely passed within one minute, divided by the key's limit
    excess_s                what passed beyond the limit, in seconds of what was sent: 1 is what hosts may miss
    by_end                  the larger of both, counted by when answers ended; latency adds to it
    first_minute            the larger of both of the first minute, divided by the limit: 1 where limits are used up
    offered                 requests that were sent, divided by what the limits allow
    limited, lost           requests that were refused for the limits, and that ended with their gateway process

The cases: `calm`; `kill`, in which gateway processes are killed in mid-storm; and `reload`, in which the file of keys
is written anew beside that, with one key more. With --hosts there is `lost`, too: one host loses its gateway with all
that it has counted. Each case takes --seconds, of which the limits' minute needs more than 60.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.keys.key import digest_of
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.key_load import GRPC, HTTP, Outcome, Storm, Stream
from tests.benchmarks.key_windows import passed_by_end, passed_first, surely_passed
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.results import at_least, at_most, print_result

LOAD = "from tests.benchmarks.key_load import main; main()"  # in a process of its own
MINUTE = 60.0
SECONDS = 80.0
KILLS = (0.3, 0.8)  # of a case's time: while nothing passes, and when the second minute has begun
RELOADS = (0.25, 0.5, 0.82)
OPERATOR = "the-operators-own-token"
CASES = ("calm", "kill", "reload")
LOST = "lost"
MOST, LEAST = 1.02, 0.9
MOST_EXCESS = 1.0  # seconds: between hosts counts are as old
PROMPT, OUTPUT = 8, 4  # tokens
TOKENS = PROMPT + OUTPUT


@dataclass(frozen=True)
class Limits:
    """One key of the storm. rate: requests a second of each of its frontends."""

    name: str
    requests: int | None
    tokens: int | None
    rate: float
    frontends: tuple[str, ...] = (GRPC, HTTP)
    n: int = 1
    is_open: bool = False  # no request names a length, so the gateway bounds it

    @property
    def entry(self) -> dict[str, Any]:
        limits = {"requests_per_minute": self.requests, "tokens_per_minute": self.tokens}
        return {"name": self.name, "sha256": digest_of(self.key).hex(), **limits}

    @property
    def key(self) -> str:
        return f"tdm-{self.name}-{'x' * 32}"

    @property
    def tokens_each(self) -> int:
        """Tokens of a request; of an open one about as many as the gateway lets it have."""
        return (self.tokens or 0) // 4 if self.is_open else PROMPT + OUTPUT * self.n

    @property
    def allowed(self) -> float:
        """Requests a minute."""
        by_tokens = None if self.tokens is None else self.tokens / self.tokens_each
        return min(one for one in (self.requests, by_tokens) if one is not None)


KEYS = (
    Limits("few", 12, None, 4.0),
    Limits("requests", 300, None, 12.0),
    Limits("tokens", None, 120 * TOKENS, 8.0),
    Limits("both", 100, 90 * TOKENS, 6.0),
    Limits("answers", None, 60 * (PROMPT + 3 * OUTPUT), 5.0, (HTTP,), n=3),
    Limits("open", None, 600, 3.0, (HTTP,), n=2, is_open=True),
    Limits("unlimited", None, None, 0.5, (GRPC,)),
)


@dataclass(frozen=True)
class Running:
    """A cluster under a storm. run: the command of another process on the clients' host, and its environment."""

    grpc: list[str]
    http: list[str]
    keys_file: Path
    ca: str | None
    security: ClientSecurity
    command: Callable[[Sequence[str]], tuple[list[str], dict[str, str]]]
    kill: Callable[[], None]
    lose: Callable[[], None] | None = None  # a host's gateway with its table


def write_keys(path: Path, keys: Sequence[Limits]) -> None:
    """Atomically, as `tandem key` does."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"keys": [one.entry for one in keys]}, sort_keys=False))
    new.chmod(0o600)
    new.replace(path)


@contextmanager
def two_processes(model: Path, folder: Path) -> Iterator[Running]:
    """Two gateway processes on one port of this host."""
    from tests.support.local_processes import LocalProcesses

    keys_file = folder / "keys.yaml"
    write_keys(keys_file, KEYS)
    settings = {"gateway.processes": 2, "gateway.port": 0, "gateway.http_port": 0, "cache.num_pages": 256}
    settings |= {"island.threads_per_worker": 1, "recovery.max_restarts": 100, "model.path": str(model)}
    settings |= {"security.api_key": OPERATOR, "security.keys_file": str(keys_file)}
    cluster = Cluster(load_config(None, settings), LocalProcesses())
    cluster.start()
    operator, turn = ClientSecurity(OPERATOR), iter(range(1 << 30))

    def kill() -> None:
        with Client(cluster.grpc_address, operator) as client:
            pids = [one.pid for one in client.cluster_info().gateways if one.pid]
        os.kill(pids[next(turn) % len(pids)], signal.SIGKILL)

    try:
        here = lambda command: ([*command], dict(os.environ))  # noqa: E731
        yield Running([cluster.grpc_address], [cluster.http_address or ""], keys_file, None, operator, here, kill)
    finally:
        cluster.stop()


@contextmanager
def two_hosts(model: Path, folder: Path) -> Iterator[Running]:
    """A gateway of one process on each of two hosts, and clients on another host, which speak gRPC alone."""
    from tests.e2e.host_cluster import TOKEN, running
    from tests.support.hosts import hosts, process_name

    keys_file = folder / "keys.yaml"
    write_keys(keys_file, KEYS)
    settings = {"gateway.nodes": "all", "gateway.port": 50061, "recovery.max_restarts": 100}
    settings |= {"security.keys_file": str(keys_file)}
    with hosts(4) as made:
        for host in range(2):
            made.start_ray(host)
        with running(made, folder, model, settings) as cluster:

            def kill() -> None:
                there = [one for one in cluster.info()["gateways"] if one["host"] == made.addresses[1]]
                os.kill(there[0]["pid"], signal.SIGKILL)

            def lose() -> None:
                for pid in made.pids(1):
                    if process_name(pid).startswith("gateway."):
                        os.kill(pid, signal.SIGKILL)

            clients = lambda command: (made.command(3, *command), cluster.environment)  # noqa: E731
            security = ClientSecurity(TOKEN, str(cluster.ca))
            yield Running(cluster.addresses, [], keys_file, str(cluster.ca), security, clients, kill, lose)


def storm(running: Running, case: str, seconds: float) -> list[Outcome]:
    """What came of each stream. Gateways are killed and files written meanwhile, as the case has it."""
    frontends = {GRPC} | ({HTTP} if running.http else set())
    streams = [
        Stream(one.name, one.key, frontend, one.rate, PROMPT, None if one.is_open else OUTPUT, one.n)
        for one in KEYS
        for frontend in set(one.frontends) & frontends or {GRPC}
        if frontend == HTTP or not one.is_open
    ]
    asked = Storm(seconds, running.grpc, running.http, streams, running.ca)
    command, environment = running.command([sys.executable, "-c", LOAD])
    events: list[tuple[float, Callable[[], None]]] = []
    if case == LOST and running.lose is not None:
        events = [(KILLS[0] * seconds, running.lose)]
    elif case != "calm":
        events += [(part * seconds, running.kill) for part in KILLS]
    if case == "reload":
        more = Limits("more", 1, None, 0.0)
        events += [
            (part * seconds, lambda keys=keys: write_keys(running.keys_file, keys))
            for part, keys in zip(RELOADS, ((*KEYS, more), KEYS, (more, *KEYS)), strict=True)
        ]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(json.dumps(asdict(asked)))
        client.stdin.close()
        assert client.stdout.readline() == "begun\n"
        begin = time.monotonic()
        over = threading.Event()
        for at, act in sorted(events, key=lambda event: event[0]):
            if not over.wait(max(0.0, begin + at - time.monotonic())):
                act()
        return [Outcome(**one) for one in json.loads(client.stdout.read())]


def numbers_of(outcomes: Sequence[Outcome], seconds: float) -> dict[str, dict[str, Any]]:
    """By key."""
    found: dict[str, dict[str, Any]] = {}
    for key in KEYS:
        own = [one for one in outcomes if one.name == key.name]
        waits = [second for one in own for second in one.retry_after]
        numbers = ratios_of(key, own, seconds) | {
            "passed": sum(len(one.passed) for one in own),
            "limited": sum(one.limited for one in own),
            "lost": sum(one.lost for one in own),
            "skipped": sum(one.skipped for one in own),
            "retry_after": [min(waits), max(waits)] if waits else [],
            "others": {code: count for one in own for code, count in one.others.items()},
        }
        found[key.name] = {
            name: round(value, 4) if isinstance(value, float) else value for name, value in numbers.items()
        }
    return found


def ratios_of(key: Limits, own: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """What passed of each limit of a key."""
    passed = [(sent, ended, tokens) for each in own for sent, ended, tokens in each.passed]
    once = [(sent, ended, 1) for sent, ended, _ in passed]
    units = {"requests": (key.requests, once, 1), "tokens": (key.tokens, passed, key.tokens_each)}
    limited = {name: (limit, rows, each) for name, (limit, rows, each) in units.items() if limit is not None}
    if not limited:
        return {}
    sent = sum(one.sent for one in own)
    surely = {name: surely_passed(rows, MINUTE) for name, (_, rows, _) in limited.items()}
    beyond = [(surely[name] - limit) / each for name, (limit, _, each) in limited.items()]
    return {name: surely[name] / limit for name, (limit, _, _) in limited.items()} | {
        "excess_s": max(0.0, *beyond) * seconds / max(1, sent),
        "by_end": max(passed_by_end(rows, MINUTE) / limit for limit, rows, _ in limited.values()),
        "first_minute": max(passed_first(rows, MINUTE) / limit for limit, rows, _ in limited.values()),
        "offered": sent / (key.allowed * seconds / MINUTE),
    }


def targets_of(
    case: str, numbers: dict[str, dict[str, Any]], seconds: float, *, hosts: bool = False
) -> list[dict[str, Any]]:
    limited = [one for one in numbers.values() if one.get("offered")]
    if hosts:
        excess = max(one["excess_s"] for one in limited)
        found = [at_most(f"{case}: what passed beyond any limit, in seconds of what was sent", excess, MOST_EXCESS)]
    else:
        most = max(one.get(name, 0.0) for one in limited for name in ("requests", "tokens"))
        found = [at_most(f"{case}: the most of any limit that passed in a minute", most, MOST)]
    free = numbers["unlimited"]
    refused = free["limited"] + sum(free["others"].values())
    found += [at_most(f"{case}: refusals of the key without limits", refused, 0)]
    if seconds >= MINUTE:
        of_known_lengths = [numbers[key.name] for key in KEYS if not key.is_open and numbers[key.name] in limited]
        least = min(one["first_minute"] for one in of_known_lengths)
        found += [
            at_least(
                f"{case}: the least of any limit that passed in the first minute, of requests of known lengths",
                least,
                LEAST,
            )
        ]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each case's storm")
    parser.add_argument("--hosts", action="store_true", help="a gateway on each of two hosts, as root")
    add_list(parser, "--cases", default=CASES, choices=(*CASES, LOST), help="default: calm kill reload")
    options = parser.parse_args(arguments)
    if LOST in options.cases and not options.hosts:
        parser.error("--cases lost is given without --hosts")
    result: dict[str, Any] = {"case": "hosts" if options.hosts else "processes", "seconds": options.seconds}
    result |= {"cases": {}, "targets": []}
    start = two_hosts if options.hosts else two_processes
    for case in options.cases:
        with tempfile.TemporaryDirectory(prefix="tdm", dir="/tmp") as name:
            folder = Path(name)
            make_checkpoint(folder / "model", size="tiny")
            with start(folder / "model", folder) as running:
                numbers = numbers_of(storm(running, case, options.seconds), options.seconds)
        result["cases"][case] = numbers
        result["targets"] += targets_of(case, numbers, options.seconds, hosts=options.hosts)
    print_result(result, options)


if __name__ == "__main__":
    main()
