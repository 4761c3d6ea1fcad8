"""Measures what streams notice while a worker of their island joins, leaves or is replaced. Prints JSON.

Under Ray, an island of two prefill and two decode workers of a tiny model on CPUs, with `--streams` that decode all the
time. In each round a decode worker joins, one leaves that has no time to finish what it has, and one is killed. Then
comes quiet time, as long as the longest of the three. Of each, median and worst over the rounds:
gap_ms      the longest silence between two tokens of a stream that goes on where it was, or moves
again_ms    the same of streams that are placed again
seconds     until the order is answered, or until the killed worker is replaced
With a transport that is not elastic each change begins an epoch of all workers.
"""

import itertools
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.processes.ray_processes import RayProcesses
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import print_result, rounded
from tests.support.oracle import random_prompt

PROMPT_TOKENS, NUM_TOKENS, VOCABULARY = 100, 600, 512
AFTER_SECONDS = 1.0  # behind a change
PATIENCE_SECONDS = 120.0
TRANSPORTS = ("tcp", "nixl", "shared_memory")


@dataclass
class Stream:
    """One request: when each token came, and how often it was placed once it has ended."""

    arrivals: list[float] = field(default_factory=list)
    attempts: int = 0

    def longest_gap(self, begin: float, end: float) -> float:
        """Between two tokens, of which the later one came after `begin` and the earlier one before `end`."""
        pairs = itertools.pairwise(self.arrivals)
        return max((later - earlier for earlier, later in pairs if later > begin and earlier < end), default=0.0)


@dataclass(frozen=True)
class Change:
    """The figures of all streams during a change."""

    seconds: float
    gap: float
    again: list[float]


class Streams:
    """So many at a time, one after another; tokens of a prompt must be the same each time. `with Streams(…):`."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]
        self.all: list[Stream] = []
        self.wrong: list[str] = []

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def _run(self, number: int) -> None:
        first: list[int] = []
        with Client(self._address) as client:
            while not self._over.is_set() and not self.wrong:
                try:
                    tokens = self._stream(client, random_prompt(PROMPT_TOKENS, number, VOCABULARY))
                except Exception as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")
                    return
                first = first or tokens
                if tokens != first:
                    self.wrong.append(f"{tokens} came; {first} are right")

    def _stream(self, client: Client, prompt: Sequence[int]) -> list[int]:
        stream, tokens = Stream(), []
        self.all.append(stream)
        for update in client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True):
            stream.arrivals.extend([time.monotonic()] * len(update.token_ids))
            tokens += update.token_ids
            if update.timings is not None:
                stream.attempts = update.timings.attempts
        return tokens

    def during(self, act: Callable[[], object]) -> Change:
        """Acts, and returns what the streams notice."""
        begin = time.monotonic()
        running = [stream for stream in self.all if not stream.attempts]
        act()
        seconds = time.monotonic() - begin
        time.sleep(AFTER_SECONDS)
        end = time.monotonic()
        later = [stream for stream in list(self.all) if stream not in running and not stream.attempts]
        until(lambda: self.wrong or all(stream.attempts for stream in running))
        if self.wrong:
            raise SystemExit(self.wrong[0])
        again = [stream.longest_gap(begin, end) for stream in running if stream.attempts > 1]
        others = [stream for stream in (*running, *later) if stream.attempts <= 1]
        return Change(seconds, max(stream.longest_gap(begin, end) for stream in others) if others else 0.0, again)


def until(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not found():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came of it within {PATIENCE_SECONDS:g} s")
        time.sleep(0.005)


def replace_worker(client: Client) -> None:
    """Kills a decode worker that has streams, and returns when another serves in its place."""

    def workers() -> Sequence[inference_pb2.WorkerInfo]:
        (island,) = client.cluster_info().islands
        return island.workers

    decoding = [one for one in workers() if one.role == inference_pb2.ROLE_DECODE]
    victim = max(decoding, key=lambda one: one.running)
    os.kill(victim.pid, signal.SIGKILL)
    until(lambda: len(known := workers()) == 4 and all(one.alive and one.pid != victim.pid for one in known))


def measure(cluster: Cluster, streams: int, rounds: Sequence[int], found: dict[str, list[Change]]) -> None:
    address = cluster.start()
    try:
        with Client(address) as client, Streams(address, streams) as load:
            until(lambda: all(stream.arrivals for stream in load.all) and len(load.all) > 2 * streams)
            changes: dict[str, Callable[[], object]] = {
                "join": partial(client.scale, num_decode=3),
                "leave": partial(client.scale, num_decode=2),
                "replace": partial(replace_worker, client),
            }
            for _ in rounds:
                for name, act in changes.items():
                    found[name].append(load.during(act))
                longest = max(found[name][-1].seconds for name in changes)
                found["quiet"].append(load.during(partial(time.sleep, longest)))
    finally:
        cluster.stop()


def summary(changes: Sequence[Change]) -> dict[str, Any]:
    values = {
        "seconds": [one.seconds for one in changes],
        "gap_ms": [1000 * one.gap for one in changes],
        "again_ms": [1000 * gap for one in changes for gap in one.again],
    }
    return {"rounds": len(changes), "placed_again": len(values["again_ms"])} | {
        name: {"median": rounded(statistics.median(seen)), "worst": rounded(max(seen))}
        for name, seen in values.items()
        if seen
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    add_list(parser, "--transports", default=["tcp"], choices=TRANSPORTS)
    add_seconds(parser)
    options = parser.parse_args()
    budget, result = Budget(options.seconds), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name) / "model", arch="llama", size="tiny", seed=0)
        for transport in budget.within(options.transports):
            values = {
                "name": f"bench-{os.getpid()}",
                "model.path": str(Path(name) / "model"),
                "island.num_prefill": 2,
                "island.num_decode": 2,
                "island.transport": transport,
                "island.threads_per_worker": 1,
                "gateway.port": 0,
                "gateway.max_attempts": 20,
                "recovery.max_restarts": 10_000,
                "recovery.drain_seconds": 0.0,
            }
            found: dict[str, list[Change]] = defaultdict(list)
            rounds = list(budget.within(range(options.rounds)))
            measure(Cluster(load_config(None, values), RayProcesses()), options.streams, rounds, found)
            result[transport] = {change: summary(seen) for change, seen in found.items()}
    print_result({"targets": []} | result, options)


if __name__ == "__main__":
    main()
