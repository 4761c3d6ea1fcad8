"""Measures what a streamed message costs the gateway, through gRPC and through HTTP. Prints JSON.

A gateway in a process of its own, between clients in others and a worker that computes nothing and gives all its
streams a token so many times a second. Frontends in turns; per frontend, medians over the rounds:

    loop_us, process_us         CPU time of the gateway a message: of its event loop's thread, of all its threads
    lag_p99_ms                  what the event loop is late for a timer by
    ttft_p50_ms, ttft_p99_ms    from a call to its first token; half of the calls come at once
    gap_p50_ms, gap_p99_ms      between two messages of a stream
    tokens_a_message            more than one where the gateway does not keep up
    tokens_s                    tokens a second
    busy                        the part of a core that the busiest process of clients takes
"""

import asyncio
import gc
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.processes.heap import keep_freed_memory
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import worker_pb2
from tandem.workers.event_loop import EventLoopThread
from tests.benchmarks.load import LoadProcesses, Outcome, Share, numbers_of
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_seconds, benchmark_parser
from tests.benchmarks.results import percentile, print_result, rounded
from tests.cluster.fake_worker import FakeWorker
from tests.support.gateways import settings_of

CALL_SECONDS = 60.0
TICK_SECONDS = 0.005
PROCESSES = 4
MAX_MODEL_LEN = 2048
WARM_UP = 16
SHOWN = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "tokens_a_message", "tokens_s", "busy")


@dataclass(eq=False)
class _Stream:
    number: int
    feed: int
    left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class SteppingWorker(FakeWorker):
    """A worker whose streams get a token a step, all in one message."""

    steps_a_second: float = 100.0
    feeds: bool = True
    streams_of_step: set[_Stream] = field(default_factory=set)
    tokens: Iterator[int] = field(default_factory=lambda: itertools.repeat(7))
    given: int = 0  # over feeds

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += 1 / self.steps_a_second
            await asyncio.sleep(max(0.0, due - loop.time()))
            for stream in list(self.streams_of_step):
                feed = self.open_feeds.get(stream.feed)
                assert feed is not None, "a feed is open before the first request that is measured"
                feed.add(stream.number, [next(self.tokens)])
                self.given += 1
                stream.left -= 1
                if not stream.left:
                    self.streams_of_step.remove(stream)
                    stream.done.set()

    async def StartGenerate(
        self, request: worker_pb2.StartGenerateRequest, context: Any
    ) -> AsyncIterator[worker_pb2.GeneratedTokens]:
        _, max_tokens = self._prepared.pop(request.request_id)
        count = max_tokens - 2 if self.open_feeds.get(request.feed) else 0
        if count > 0:
            stream = _Stream(request.number, request.feed, count)
            self.streams_of_step.add(stream)
            try:
                await stream.done.wait()
            finally:
                self.streams_of_step.discard(stream)
        last = [7] * (max_tokens - 1 - count)
        yield worker_pb2.GeneratedTokens(token_ids=last, finish_reason=2, fed=count)  # type: ignore[arg-type]  # length


class Lag:
    """Measures all the time how late an event loop is."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.turns: list[float] = []  # CPU seconds of the loop's thread, from one look to the next

    async def run(self) -> None:
        used = time.thread_time()
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.seconds.append(time.perf_counter() - due)
            self.turns.append(time.thread_time() - used)
            used += self.turns[-1]


@dataclass(frozen=True)
class Spent:
    """CPU seconds of the gateway since it began; lags, and CPU seconds of turns, since this was last asked for."""

    loop: float
    process: float
    lags: list[float]
    turns: list[float]


def serve_worker(pipe: Connection, steps_a_second: float) -> None:
    """Serves in a process of its own: sends its island, and serves until it is asked to stop."""
    events, worker = EventLoopThread("worker"), SteppingWorker(lambda _: 7, steps_a_second=steps_a_second)
    events.run(worker.start(), CALL_SECONDS)
    ticking = events.run(_begun(worker.run()), CALL_SECONDS)
    pipe.send(worker.state("i", epoch=1, version=1))
    pipe.recv()
    ticking.cancel()
    events.run(worker.stop(), CALL_SECONDS)
    events.stop()


def one_gateway(model: str) -> GatewaySettings:
    """The settings of a lone gateway process with both frontends."""
    config = load_config(None, {"model.path": model, "gateway.port": 0, "gateway.http_port": 0})
    return settings_of(config, MAX_MODEL_LEN, 1 << 20)


def serve_gateway(pipe: Connection, settings: GatewaySettings, island: IslandState) -> None:
    """Serves in a process of its own: sends its addresses, then what it has spent as often as asked."""
    keep_freed_memory()  # as in a cluster
    events, lag = EventLoopThread("gateway"), Lag()
    gateway = Gateway(settings)
    gc.collect()
    gc.freeze()  # as in a cluster, whose processes are forked from one that has imported all
    addresses = events.run(gateway.start(), CALL_SECONDS)
    gateway.prepare()
    events.run(gateway.update_island(island), CALL_SECONDS)
    looking = events.run(_begun(lag.run()), CALL_SECONDS)
    pipe.send(addresses)
    while pipe.recv():
        pipe.send(events.run(_spent(lag), CALL_SECONDS))
    looking.cancel()
    events.run(gateway.stop(0.1), CALL_SECONDS)
    events.stop()


async def _begun(work: Any) -> "asyncio.Task[None]":
    return asyncio.create_task(work)


async def _spent(lag: Lag) -> Spent:
    lags, lag.seconds = lag.seconds, []
    turns, lag.turns = lag.turns, []
    return Spent(time.thread_time(), time.process_time(), lags, turns)


@contextmanager
def process_of(target: Any, *given: Any) -> Iterator[Connection]:
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(there, *given), daemon=True)
    process.start()
    try:
        yield here
        here.send(None)
    finally:
        process.join(CALL_SECONDS)


def costs_of(outcome: Outcome, before: Spent, after: Spent) -> dict[str, float]:
    messages = sum(1 + len(one.gaps) for one in outcome.served)
    numbers = numbers_of(outcome)
    return {
        "loop_us": (after.loop - before.loop) / messages * 1e6,
        "process_us": (after.process - before.process) / messages * 1e6,
        "lag_p99_ms": percentile(after.lags, 99) * 1e3,
        **{name: numbers[name] for name in SHOWN},
    }


def measure(clients: int, output: int, steps: float, rounds: int, budget: Budget) -> dict[str, dict[str, float]]:
    """Per frontend the medians over the rounds."""
    rows: dict[str, list[dict[str, float]]] = {"grpc": [], "http": []}
    with tempfile.TemporaryDirectory() as folder, LoadProcesses(PROCESSES) as processes:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        with (
            process_of(serve_worker, steps) as worker,
            process_of(serve_gateway, one_gateway(folder), worker.recv()) as gateway,
        ):
            addresses = gateway.recv()
            for number in budget.within(range(-1, rounds), least=2):
                few = clients // PROCESSES if number >= 0 else WARM_UP
                for frontend, row in rows.items():
                    http = addresses.http if frontend == "http" else ""
                    seeds = range(number * PROCESSES, (number + 1) * PROCESSES)
                    shares = [Share(addresses.grpc, 128, output, 2 * few, seed, few, http=http) for seed in seeds]
                    gateway.send(True)
                    before = gateway.recv()
                    outcome = processes.run(shares)
                    gateway.send(True)
                    row.append(costs_of(outcome, before, gateway.recv()))
    return {
        frontend: {name: Measured.median(each[name] for each in row[1:]) for name in row[0]}
        for frontend, row in rows.items()
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--output", type=int, default=64, help="mean tokens of an output")
    parser.add_argument("--steps", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    add_seconds(parser)
    given = parser.parse_args()
    measured = measure(given.clients, given.output, given.steps, given.rounds, Budget(given.seconds))
    ratios = {name: rounded(value / measured["grpc"][name]) for name, value in measured["http"].items()}
    sizes = {"case": f"{given.clients} clients", "steps_a_second": given.steps}
    print_result({**sizes, **measured, "http_to_grpc": ratios}, given)


if __name__ == "__main__":
    main()
