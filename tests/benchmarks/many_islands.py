"""Measures what the gateway does with 1, 8 and 64 islands of workers that compute nothing. Prints JSON.

A gateway of one process, and the workers in another: each island is a prefill and a decode worker of one server. Each
worker has reported 4,096 pages. Per number of islands, medians over the rounds, of decisions the least of five:

    decision_us     from a request of 1,024 tokens, whose keys are made, to the first pair of workers
    status_ms       GetClusterInfo within the gateway: all workers are asked at once
    scrape_ms       the text of /metrics, all workers asked
    join_ms         all islands told to a process that starts
    update_ms       an island's next epoch: links to its workers are closed, what they reported is dropped, and others
                    are opened
    lag_ms          the longest that the event loop is late for a timer while a scrape is made: what streams wait
    growth          64 islands ÷ 8 islands ÷ 8: 1 is linear
"""

import asyncio
import itertools
import tempfile
import time
import timeit
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.gateway import Gateway
from tandem.cluster.metrics.scrape import FRESH_SECONDS
from tandem.cluster.peers.table import GatewayFile
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.policy import Ask
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import worker_pb2
from tandem.workers.event_loop import EventLoopThread
from tests.benchmarks.frontends import Lag, process_of
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_most, print_result, rounded
from tests.cluster.fake_worker import FakeWorker
from tests.support.gateways import settings_of

CALL_SECONDS = 60.0
ISLANDS = (1, 8, 64)
PROMPT = 1024
PAGES = 4096  # of each worker
DECISIONS = 50
MAX_MODEL_LEN = 2048
MOST = 1.2  # times linear


class ReportingWorker(FakeWorker):
    """Says once that it holds PAGES pages, which no other worker holds."""

    async def Watch(self, request: worker_pb2.WatchRequest, context: Any) -> AsyncIterator[worker_pb2.WorkerReport]:
        held = np.random.default_rng().integers(0, 1 << 63, PAGES, np.int64)
        yield worker_pb2.WorkerReport(whole=True, added=held.astype("<u8").tobytes())
        await asyncio.sleep(CALL_SECONDS * CALL_SECONDS)


def serve_workers(pipe: Connection, islands: int) -> None:
    """Serves in a process of its own: sends all islands, and serves until it is told to stop."""
    events, workers = EventLoopThread("workers"), [ReportingWorker(lambda _: 7) for _ in range(islands)]
    for worker in workers:
        events.run(worker.start(), CALL_SECONDS)
    states = [worker.state(f"i{number}", epoch=1, version=1) for number, worker in enumerate(workers)]
    pipe.send([replace(state, number=number) for number, state in enumerate(states)])
    pipe.recv()
    for worker in workers:
        events.run(worker.stop(), CALL_SECONDS)
    events.stop()


async def seconds_of(work: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


async def reported(gateway: Gateway, states: Sequence[IslandState]) -> None:
    """Returns once all workers' pages are known."""
    deadline = time.monotonic() + CALL_SECONDS
    while len(gateway._islands._prefixes.pages) < PAGES * sum(len(state.workers) for state in states):
        assert time.monotonic() < deadline, "workers do not report"
        await asyncio.sleep(0.01)


async def one_round(gateway: Gateway, states: Sequence[IslandState], epoch: int) -> dict[str, float]:
    """epoch: the next one of the island whose turn it is."""
    islands = gateway._islands
    draw = np.random.default_rng(epoch)
    made = [islands.prompt_keys(draw.integers(0, 1 << 17, PROMPT, np.int64), b"") for _ in range(10)]
    for keys in made:
        keys.first(keys.num_pages)
    decide = (next(islands.pairs(Ask(PROMPT, 100), keys)) for keys in itertools.cycle(made))
    decision = min(timeit.repeat(lambda: next(decide), number=DECISIONS, repeat=5)) / DECISIONS
    status = await seconds_of(gateway._account.info)
    await asyncio.sleep(2 * FRESH_SECONDS)
    scrape, lag = gateway._admin._scrape, Lag()
    assert scrape is not None, "metrics are on"
    looking = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    scraped = await seconds_of(scrape.text)
    await asyncio.sleep(0.05)
    looking.cancel()
    after = replace(states[epoch % len(states)], epoch=epoch, version=epoch)
    updated = await seconds_of(lambda: gateway.update_island(after))
    await reported(gateway, states)
    return {
        "decision_us": decision * 1e6,
        "status_ms": status * 1e3,
        "scrape_ms": scraped * 1e3,
        "update_ms": updated * 1e3,
        "lag_ms": max(lag.seconds) * 1e3,
    }


async def joined(gateway: Gateway, states: Sequence[IslandState]) -> float:
    await gateway.start()
    begun = time.perf_counter()
    await asyncio.gather(*map(gateway.update_island, states))
    seconds = time.perf_counter() - begun
    await reported(gateway, states)
    return seconds


def measure(model: str, count: int, rounds: int, budget: Budget) -> dict[str, float]:
    config = load_config(None, {"model.path": model, "gateway.port": 0})
    events, file = EventLoopThread("gateway"), GatewayFile(1, max(ISLANDS))
    settings = settings_of(config, MAX_MODEL_LEN, 1 << 20)
    settings = replace(settings, num_islands=max(ISLANDS), table=file.path, peer_token="none")
    with process_of(serve_workers, count) as workers:
        states: list[IslandState] = workers.recv()
        gateway = Gateway(settings)
        try:
            join = events.run(joined(gateway, states), CALL_SECONDS)
            rows = [
                events.run(one_round(gateway, states, number + 3), CALL_SECONDS)
                for number in budget.within(range(-1, rounds), least=2)
            ][1:]
        finally:
            events.run(gateway.stop(0.1), CALL_SECONDS)
            events.stop()
            file.close()
    return {"join_ms": rounded(join * 1e3)} | {name: Measured.median(row[name] for row in rows) for name in rows[0]}


def growth_of(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Empty where it was not measured."""
    few, many = found.get("8 islands"), found.get("64 islands")
    return {} if few is None or many is None else {name: rounded(many[name] / few[name] / 8) for name in many}


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--islands", int, default=ISLANDS)
    parser.add_argument("--rounds", type=int, default=9)
    add_seconds(parser)
    given = parser.parse_args()
    budget = Budget(given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        found = {f"{count} islands": measure(folder, count, given.rounds, budget) for count in given.islands}
    growth = growth_of(found)
    targets = [
        at_most(f"{name}, 64 islands ÷ 8 islands ÷ 8", growth[name], MOST)
        for name in ("decision_us", "status_ms", "scrape_ms", "update_ms", "lag_ms")
        if growth
    ]
    print_result({**found, "growth": growth, "targets": targets}, given)


if __name__ == "__main__":
    main()
