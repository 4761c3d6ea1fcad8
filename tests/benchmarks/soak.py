"""Checks that the memory of a cluster is bounded under honest and hostile traffic. Prints JSON.

A cluster of one prefill and one decode worker on the CPU, with a token. Honest clients make calls of all kinds:
streams, whole answers, cancelled ones, guided ones, tools, log-probabilities. An attacker (nice 10) makes one attack of
`tests/benchmarks/strangers/` after another, all in turns. Each process of the cluster is looked at every 15 s:

    rss_mib, anonymous_mib   resident memory, and the part that is its own
    fds, threads             that it has

For each process, by what `ps` shows:

    start, half, end         at the first look, in the middle, at the last one
    low, high                in the second half
    per_hour                 slope of the second half: the median of the slopes between all pairs of its looks
    by_minute                resident memory in MiB, some twelve looks

    done, lost               honest calls
    attacks                  how many attacks were made, and what attackers were told
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.frontends import process_of
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.pair import running_cluster
from tests.benchmarks.results import at_most, plot, print_result, rounded
from tests.benchmarks.soak_clients import Calls, soak
from tests.benchmarks.strangers.attacker import ATTACKS, attack
from tests.benchmarks.strangers.attacks import Target
from tests.support.local_processes import LocalProcesses

TOKEN = "0123456789abcdef-soak"
CONNECTIONS = 4  # of the attacker
TITLE = "tandem: "  # of the cluster's processes
READER = "reader"  # they come and go: those of a moment count together
FLAT_MIB = 16.0  # target: growth in an hour, of the second half
POINTS = 12  # of by_minute
QUANTITIES = ("rss_mib", "anonymous_mib", "fds", "threads")

Look = dict[str, float]


@dataclass
class Series:
    """The looks at one process, or at those of one title together."""

    minutes: list[float] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        half = len(self.looks) // 2
        found: dict[str, Any] = {}
        for name in QUANTITIES:
            values = [look[name] for look in self.looks]
            found[name] = {
                "start": rounded(values[0]),
                "half": rounded(values[half]),
                "end": rounded(values[-1]),
                "low": rounded(min(values[half:])),
                "high": rounded(max(values[half:])),
                "per_hour": rounded(60 * slope(self.minutes[half:], values[half:])),
            }
        step = max(1, len(self.looks) // POINTS)
        points = zip(self.minutes[::step], self.looks[::step], strict=True)
        found["by_minute"] = {f"{minute:04.1f}": rounded(look["rss_mib"]) for minute, look in points}
        return found


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Theil and Sen's: the median over all pairs. 0 for fewer than two."""
    pairs = itertools.combinations(zip(times, values, strict=True), 2)
    slopes = [(later - value) / (then - when) for (when, value), (then, later) in pairs if then > when]
    return statistics.median(slopes) if slopes else 0.0


def look_at(pid: int) -> Look:
    """OSError when the process has ended."""
    folder = Path(f"/proc/{pid}")
    rollup = dict(line.split(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
    return {
        "rss_mib": int(rollup["Rss"].split()[0]) / 1024,
        "anonymous_mib": int(rollup["Anonymous"].split()[0]) / 1024,
        "fds": len(os.listdir(folder / "fd")),
        "threads": len(os.listdir(folder / "task")),
    }


def title_of(pid: int) -> str:
    """Without what this run alone has in it; empty for a process that is none of the cluster's."""
    title = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace").rstrip()
    return title.removeprefix(TITLE).rpartition("/")[2] if title.startswith(TITLE) else ""


def look_around(known: Iterable[int]) -> dict[str, Look]:
    """The cluster's processes by their titles. known: some of each fork server's, which has forked the others, too."""
    found: dict[str, Look] = {}
    servers = set[int]()
    for pid in known:
        with suppress(OSError):
            servers.add(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))
    for pid in itertools.chain.from_iterable(map(children_of, servers)):
        with suppress(OSError):
            title = title_of(pid)
            if title:
                seen = look_at(pid)
                before = found.get(title, dict.fromkeys(QUANTITIES, 0.0))
                found[title] = {name: before[name] + seen[name] for name in QUANTITIES}
    return found


def children_of(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


class Hostility:
    """One attack after another, each for so long."""

    def __init__(self, attacker: Connection, names: Sequence[str], each: float) -> None:
        self._attacker = attacker
        self._names = itertools.cycle(names)
        self._each = each
        self._until = 0.0
        self._name = ""
        self.made: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()

    def go_on(self, now: float) -> None:
        """Begins the next attack where the last one has had its time."""
        if now < self._until:
            return
        self.end()
        self._name = next(self._names)
        self._attacker.send((self._name, CONNECTIONS))
        self._until = now + self._each
        self.made[self._name] += 1

    def end(self) -> None:
        """Idempotent."""
        if self._name:
            self._attacker.send(None)
            self.answers += self._attacker.recv()
            self._name = ""


def watch(
    seconds: float, every: float, hostility: Hostility, honest: Connection, processes: LocalProcesses
) -> tuple[dict[str, Series], Calls]:
    """The cluster for so long, with a look at its processes now and then."""
    series: dict[str, Series] = {}
    began = time.monotonic()
    honest.send(seconds)
    due = 0.0
    while (passed := time.monotonic() - began) < seconds:
        if passed >= due:
            due = passed + every
            for title, look in look_around(processes.pids.values()).items():
                one = series.setdefault(title, Series())
                one.minutes.append(passed / 60)
                one.looks.append(look)
            print(f"{passed / 60:.1f} min: {summary(series)}", file=sys.stderr, flush=True)
        hostility.go_on(passed)
        time.sleep(0.2)
    hostility.end()
    return series, honest.recv()


def summary(series: dict[str, Series]) -> str:
    return ", ".join(f"{title} {one.looks[-1]['rss_mib']:.0f} MiB" for title, one in sorted(series.items()))


def run(given: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        overrides = {
            "gateway.http_port": 0,
            "metrics.port": 0,
            "security.api_key": TOKEN,
            "cache.num_pages": 1024,
            "gateway.processes": given.gateways,
        }
        processes = LocalProcesses()
        cluster = stack.enter_context(running_cluster("local.yaml", Path(folder), overrides, processes))
        target = Target(cluster.http_address or "", cluster.grpc_address, cluster.metrics_address or "", TOKEN)
        honest = stack.enter_context(process_of(soak, target, given.rate, given.seed))
        attacker = stack.enter_context(process_of(attack, target))
        hostility = Hostility(attacker, given.attacks, given.each)
        series, calls = watch(given.minutes * 60, given.every, hostility, honest, processes)
    numbers = {title: one.numbers() for title, one in series.items()}
    memory = {title: [look["rss_mib"] for look in one.looks] for title, one in series.items()}
    most = max(series.values(), key=lambda one: len(one.looks))
    whole = {title: values for title, values in memory.items() if len(values) == len(most.looks)}
    return {
        "minutes": given.minutes,
        "done": calls.done.total(),
        "lost": calls.lost.total(),
        "calls": {"done": dict(calls.done), "lost": dict(calls.lost.most_common(12))},
        "attacks": {"made": dict(hostility.made), "answers": dict(hostility.answers.most_common(20))},
        "processes": numbers,
        "plots": [plot("resident memory", "minutes", "MiB", [rounded(one) for one in most.minutes], whole)],
    }


def targets_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    targets = [at_most("lost", result["lost"], 0)]
    for title, numbers in result["processes"].items():
        if title != READER:
            memory = numbers["rss_mib"]
            targets.append(at_most(f"processes.{title}.rss_mib.per_hour", memory["per_hour"], FLAT_MIB))
            targets.append(at_most(f"processes.{title}.fds.per_hour", numbers["fds"]["per_hour"], 1.0))
    return targets


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--attacks", choices=list(ATTACKS), default=list(ATTACKS), help="which; all by default")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two looks")
    parser.add_argument("--each", type=float, default=20.0, help="seconds of each attack")
    parser.add_argument("--rate", type=float, default=4.0, help="honest calls a second")
    parser.add_argument("--seed", type=int, default=1, help="of what honest clients draw")
    parser.add_argument("--gateways", type=int, default=1, help="gateway processes")
    given = parser.parse_args()
    result = run(given)
    print_result({**result, "targets": targets_of(result)}, given)


if __name__ == "__main__":
    main()
