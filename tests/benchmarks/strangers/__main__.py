"""Measures what strangers cost others. Prints JSON.

A cluster of one prefill and one decode worker on the CPU, with a token. An honest client calls it all the time. An
attacker in a process of its own (nice 10) makes one attack after another, over 1 connection and over 4. A quiet phase
comes before each attack. For each attack, and for all quiet phases together (`quiet`):

    health_p50_ms, health_p99_ms   GET /health, on a connection that stays open
    http_p50_ms, http_p99_ms       the first token of a stream over HTTP
    grpc_p50_ms, grpc_p99_ms       the same over gRPC
    calls                          of the honest client
    busy                           the part of a core that the gateway took
    lost                           honest calls that failed
    answers                        what the attacker was told

These go to stderr as they come. The result has `more_ms`, the most that an attack adds to one of the three p99, how
many calls were `lost`, and the p99 themselves as a plot.

An attack is a function in `http_attacks.py` or `grpc_attacks.py`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.cluster.client import Client
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.frontends import process_of
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.pair import running_cluster
from tests.benchmarks.results import at_most, percentile, plot, print_result, rounded
from tests.benchmarks.strangers.attacker import ATTACKS, attack
from tests.benchmarks.strangers.attacks import Answers, Target
from tests.benchmarks.strangers.honest import CALLS, Seen, be_honest
from tests.support.local_processes import LocalProcesses

TOKEN = "0123456789abcdef-strangers"
SETTLE_SECONDS = 0.5  # from the start of an attack to the first honest call, and from its end to the next phase
WARM_UP_SECONDS = 3.0
MORE_MS = 100.0  # target: what an attack may add to the p99 of honest calls


@dataclass
class Stage:
    honest: Connection
    attacker: Connection
    gateway_pid: int

    def quiet(self, seconds: float) -> tuple[Seen, float]:
        """Returns what the honest client saw, and the part of a core that the gateway took."""
        before = cpu_seconds(self.gateway_pid)
        self.honest.send(seconds)
        seen = self.honest.recv()
        return seen, (cpu_seconds(self.gateway_pid) - before) / seconds

    def under(self, name: str, connections: int, seconds: float) -> tuple[Seen, float, Answers]:
        """The same under an attack, and what the attacker was told."""
        self.attacker.send((name, connections))
        self.honest.send(SETTLE_SECONDS)
        self.honest.recv()
        seen, busy = self.quiet(seconds)
        self.attacker.send(None)
        answers = self.attacker.recv()
        time.sleep(SETTLE_SECONDS)
        return seen, busy, answers


def certificates(folder: Path) -> dict[str, str]:
    """Settings of a cluster that speaks TLS. Its certificate signs itself, so it is that of the authority, too."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    kind = ["-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", *kind, *names, "-keyout", key, "-out", cert]
    subprocess.run(made, check=True, capture_output=True)
    return {"security.tls_cert": cert, "security.tls_key": key}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def numbers_of(phases: Sequence[tuple[Seen, float]]) -> dict[str, Any]:
    """Returns the numbers of one phase or more."""
    numbers: dict[str, Any] = {}
    for call in CALLS:
        seconds = [one for seen, _ in phases for one in seen.seconds[call]]
        for percent in (50, 99):
            numbers[f"{call}_p{percent}_ms"] = rounded(percentile(seconds, percent) * 1e3)
    lost = sum((seen.lost for seen, _ in phases), start=Answers())
    numbers["calls"] = sum(len(seconds) for seen, _ in phases for seconds in seen.seconds.values())
    numbers["busy"] = rounded(sum(busy for _, busy in phases) / len(phases))
    return numbers | {"lost": lost.total()} | ({"errors": dict(lost)} if lost else {})


def measure(
    stage: Stage, names: Sequence[str], connections: Sequence[int], each: float, budget: Budget
) -> Iterator[tuple[str, list[tuple[Seen, float]], dict[str, Any]]]:
    """Per attack its name, its quiet phase, and its numbers."""
    stage.quiet(WARM_UP_SECONDS)
    for name in budget.within(names):
        quiet = [stage.quiet(each)]
        for number in connections:
            seen, busy, answers = stage.under(name, number, each)
            found = numbers_of([(seen, busy)]) | {"answers": dict(answers.most_common(6))}
            print(f"{name}.{number}: {found}", file=sys.stderr, flush=True)
            yield f"{name}.{number}", quiet, found
            quiet = []


def run(given: Any) -> dict[str, dict[str, Any]]:
    quiet: list[tuple[Seen, float]] = []
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        ports = {"gateway.http_port": 0, "metrics.port": 0}
        tls = certificates(Path(folder)) if given.tls else {}
        overrides = {**ports, "security.api_key": TOKEN, "cache.num_pages": 256, **tls}
        cluster = stack.enter_context(running_cluster("local.yaml", Path(folder), overrides, LocalProcesses()))
        http, metrics = cluster.http_address or "", cluster.metrics_address or ""
        ca = tls.get("security.tls_cert")
        target = Target(http, cluster.grpc_address, metrics, TOKEN, ca)
        with Client(target.grpc, target.security) as client:
            pid = client.cluster_info().gateways[0].pid
        honest = stack.enter_context(process_of(be_honest, target))
        attacker = stack.enter_context(process_of(attack, target))
        stage = Stage(honest, attacker, pid)
        for name, phases, numbers in measure(
            stage, given.attacks, given.connections, given.each, Budget(given.seconds)
        ):
            quiet += phases
            found[name] = numbers
    return {"quiet": numbers_of(quiet), **found}


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Sums up what run() found, with one number an attack to record: the most that it adds to any p99."""
    calm, attacks = found["quiet"], {name: numbers for name, numbers in found.items() if name != "quiet"}
    p99 = {call: f"{call}_p99_ms" for call in CALLS}
    more = {name: rounded(max(one[key] - calm[key] for key in p99.values())) for name, one in attacks.items()}
    lost = sum(one["lost"] for one in attacks.values())
    targets = [at_most(f"more_ms.{name}", value, MORE_MS) for name, value in more.items()]
    names = ["quiet", *attacks]
    bars = {call: [found[name][key] for name in names] for call, key in p99.items()}
    return {
        "quiet": {key: calm[key] for key in (*p99.values(), "busy", "lost")},
        "more_ms": more,
        "lost": lost,
        "targets": [*targets, at_most("lost", lost, 0)],
        "plots": [plot("p99 of honest calls", "", "ms", names, bars)],
    }


def main() -> None:
    parser = benchmark_parser(str(Path(__file__).parent), __doc__)
    add_list(parser, "--attacks", choices=list(ATTACKS), default=list(ATTACKS), help="which; all by default")
    add_list(parser, "--connections", int, default=[1, 4], help="of the attacker")
    parser.add_argument("--each", type=float, default=6.0, help="seconds of each phase")
    parser.add_argument("--tls", action="store_true", help="ports speak TLS, and the attacker does")
    add_seconds(parser)
    given = parser.parse_args()
    print_result(summary(run(given)), given)


if __name__ == "__main__":
    main()
