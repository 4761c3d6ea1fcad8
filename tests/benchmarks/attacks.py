"""Measures what a client that attacks the gateway costs the streams of others. Prints JSON.

A gateway in a process of its own, a worker that computes nothing and gives each stream a token so many times a second,
clients that read those streams over both frontends, and one attack after another from a process of its own. That one
gives way to all others (nice 19), as if it ran on another machine. For each attack, and without one:

    gap_p50_ms, gap_p99_ms, gap_max_ms   between two messages of a stream of others
    lag_max_ms                           what the gateway's event loop was late for a timer by
    loop_max_ms                          CPU time that the event loop took between two timers: on a busy machine, too
    more_ms                              gap_max_ms, beyond that without an attack
    broken                               streams of others that ended with an error
    mib                                  what the gateway's memory grew by at most, helpers not counted
    answers                              what the attacker was told, by status

A new attack is a function of `tests/benchmarks/attack_kinds.py`.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.cluster.client import AsyncClient
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.settings import GatewayAddresses, GatewaySettings
from tandem.cluster.tools.bench.event_streams import HttpConnections
from tandem.cluster.tools.bench.openai import COMPLETIONS
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.attack_kinds import ATTACKS, Send, Target, use_slow_tokenizer
from tests.benchmarks.frontends import Spent, process_of, serve_gateway, serve_worker
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_most, percentile, print_result, rounded
from tests.support import gateways

MAX_MODEL_LEN = 1 << 17
POOL_PAGES = 1 << 22
POLL_SECONDS = 0.05
SETTLE_SECONDS = 1.0
WARM_UP_SECONDS = 2.0
LONGEST_SECONDS = 120.0


@dataclass
class Watch:
    """The streams of others, for some seconds."""

    addresses: GatewayAddresses
    streams: int  # over each frontend
    gaps: list[float] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)

    async def run(self, seconds: float) -> None:
        http = HttpConnections(f"http://{self.addresses.http}", token=None)
        async with AsyncClient(self.addresses.grpc, client_id="others") as client, aclosing(http):
            streams = [self._endless(self._over_grpc, client) for _ in range(self.streams)]
            streams += [self._endless(self._over_http, http) for _ in range(self.streams)]
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*streams)

    async def _endless(self, stream: Any, connection: Any) -> None:
        while True:
            try:
                await stream(connection)
            except Exception as error:
                self.broken[f"{type(error).__name__}: {error}"[:200]] += 1
                await asyncio.sleep(POLL_SECONDS)

    async def _over_grpc(self, client: AsyncClient) -> None:
        with self._stream() as take:
            async for _ in client.generate([5, 6, 7], max_tokens=MAX_MODEL_LEN // 2, temperature=0, ignore_eos=True):
                take()

    async def _over_http(self, http: HttpConnections) -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": MAX_MODEL_LEN // 2, "ignore_eos": True, "stream": True}
        with self._stream() as take:
            await http.call("POST", COMPLETIONS, json.dumps(body).encode(), lambda _: take())

    @contextmanager
    def _stream(self) -> Iterator[Callable[[], None]]:
        """Yields a function to call for each message. The gap that is open at the end counts, too."""
        last: float | None = None

        def take() -> None:
            nonlocal last
            now = time.perf_counter()
            if last is not None:
                self.gaps.append(now - last)
            last = now

        try:
            yield take
        finally:
            take()


def watch(pipe: Connection, addresses: GatewayAddresses, streams: int) -> None:
    """Watches for as many seconds as it is asked to, as often as it is asked. Runs in a process of its own."""
    while (seconds := pipe.recv()) is not None:
        one = Watch(addresses, streams)
        asyncio.run(one.run(seconds))
        pipe.send((one.gaps, one.broken))


def attack(pipe: Connection, target: Target) -> None:
    """Attacks in a process of its own: for each name makes its messages, says so, and attacks for so many seconds."""
    os.nice(19)
    while (name := pipe.recv()) is not None:
        kind = ATTACKS[name]()
        pipe.send(True)
        pipe.send(asyncio.run(_attacked(kind, target, pipe.recv())))


async def _attacked(kind: Send, target: Target, seconds: float) -> Counter[str]:
    answers: Counter[str] = Counter()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                await kind(target, answers)
    return answers


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@dataclass
class Stage:
    """A gateway with its worker and watchers."""

    gateway: Connection
    watcher: Connection
    target: Target
    gateway_pid: int

    def look(self, seconds: float, attacker: Connection | None = None) -> dict[str, Any]:
        """Returns what the others saw for so many seconds, with an attacker at work or none."""
        self._spent()
        before = most = resident_mib(self.gateway_pid)
        self.watcher.send(seconds)
        if attacker is not None:
            attacker.send(max(0.1, seconds - SETTLE_SECONDS))
        ends = time.monotonic() + LONGEST_SECONDS
        while not self.watcher.poll(POLL_SECONDS) and time.monotonic() < ends:
            most = max(most, resident_mib(self.gateway_pid))
        gaps, broken = self.watcher.recv()
        spent = self._spent()
        numbers = {
            "gap_p50_ms": percentile(gaps, 50) * 1e3,
            "gap_p99_ms": percentile(gaps, 99) * 1e3,
            "gap_max_ms": max(gaps) * 1e3,
            "lag_max_ms": max(spent.lags) * 1e3,
            "loop_max_ms": max(spent.turns) * 1e3,
            "broken": broken.total(),
            "mib": most - before,
        }
        return {name: rounded(value) for name, value in numbers.items()} | ({"errors": broken} if broken else {})

    def _spent(self) -> Spent:
        self.gateway.send(True)
        return self.gateway.recv()


def settings_of(model: str, overrides: dict[str, Any]) -> GatewaySettings:
    """The settings of a lone gateway process with both frontends."""
    given = {"model.path": model, "gateway.port": 0, "gateway.http_port": 0, **overrides}
    return gateways.settings_of(load_config(None, given), MAX_MODEL_LEN, POOL_PAGES)


def child_of(pid: int, known: set[int]) -> int:
    """The process that this one has started since it had those `known`."""
    (new,) = children_of(pid) - known
    return new


def children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def measure(names: list[str], streams: int, steps: float, each: float, budget: Budget) -> dict[str, dict[str, Any]]:
    """Per attack, and for `none`, the numbers."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        use_slow_tokenizer(Path(folder))
        worker = stack.enter_context(process_of(serve_worker, steps))
        island = worker.recv()
        known = children_of(os.getpid())  # multiprocessing's own process is among them now
        gateway = stack.enter_context(process_of(serve_gateway, settings_of(folder, {}), island))
        pid = child_of(os.getpid(), known)
        addresses = gateway.recv()
        watcher = stack.enter_context(process_of(watch, addresses, streams))
        target = Target(addresses.grpc, addresses.http or "")
        attacker = stack.enter_context(process_of(attack, target))
        stage = Stage(gateway, watcher, target, pid)
        stage.look(WARM_UP_SECONDS)  # connects, and makes what is made once
        found["none"] = stage.look(each)
        for name in budget.within(names):
            attacker.send(name)
            attacker.recv()
            numbers = stage.look(each, attacker)
            answers = attacker.recv()
            more = rounded(numbers["gap_max_ms"] - found["none"]["gap_max_ms"])
            found[name] = {"more_ms": more, **numbers, "answers": dict(answers.most_common(6))}
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--attacks", choices=list(ATTACKS), default=list(ATTACKS), help="which; all by default")
    parser.add_argument("--streams", type=int, default=8, help="of others, over each frontend")
    parser.add_argument("--steps", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--each", type=float, default=10.0, help="seconds of each attack")
    add_seconds(parser)
    given = parser.parse_args()
    found = measure(given.attacks, given.streams, given.steps, given.each, Budget(given.seconds))
    targets = [at_most(f"{name}.more_ms", one["more_ms"], 100.0) for name, one in found.items() if name != "none"]
    print_result({**found, "targets": targets}, given)


if __name__ == "__main__":
    main()
