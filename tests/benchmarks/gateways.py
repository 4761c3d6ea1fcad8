"""Measures what a gateway of several processes writes, and how evenly. Prints JSON.

N gateway processes on one port, clients in processes of their own with many connections, and a worker that computes
nothing and gives each stream a token a step. Of the seconds in which all streams run:

    tokens_s                  tokens a second that came to clients
    busiest_loop              the part of a core that the busiest event loop takes
    cores                     cores that all gateway processes take together
    token_us                  CPU time of all of them a token, in microseconds
    gap_p50_ms, gap_p99_ms    between two messages of a stream
    late_p99_ms               the latter less a step
    tokens_a_message          more than one where the gateway does not keep up
    clients_busy              the part of a core that the busiest process of clients takes: near 1 it limits the rest
    fewest_tokens             of a stream, as a part of the median stream's: near 1 all of them ran

On a host of 16 cores: `--processes 1 2 4 --streams 1024 --tokens 60000 --client-processes 10`.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tandem.cluster.gateway.settings import GatewaySettings
from tandem.cluster.peers.table import GatewayFile
from tandem.cluster.supervision.shared_ports import SharedPorts
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.frontends import MAX_MODEL_LEN, Spent, one_gateway, process_of, serve_gateway, serve_worker
from tests.benchmarks.load import LoadProcesses, Outcome, Share
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, at_most, percentile, print_result

PROMPT = 16
WARM_UP_TOKENS = 4
ENOUGH_CORES = 16
RAMP_SECONDS = 4.0  # until all streams run
PEER_TOKEN = "of this benchmark"
MOST_LOOP, MOST_LATE_MS, LEAST_TOKENS = 0.8, 5.0, 0.95


@dataclass(frozen=True)
class Load:
    """The load that clients make. tokens: a second, of all streams together."""

    streams: int
    tokens: float
    seconds: float
    client_processes: int
    connections: int

    @property
    def steps(self) -> float:
        """A second."""
        return self.tokens / self.streams

    @property
    def output(self) -> int:
        """Mean tokens of a stream; the shortest has half of it, and lasts as long as is measured."""
        return 2 * int(self.steps * (RAMP_SECONDS + self.seconds))

    def shares(self, address: str, output: int) -> list[Share]:
        """One for each process of clients."""
        each, lines = self.streams // self.client_processes, max(1, self.connections // self.client_processes)
        return [
            Share(address, PROMPT, output, each, seed, each, connections=lines) for seed in range(self.client_processes)
        ]


@contextmanager
def running_gateways(model: str, count: int, steps: float) -> Iterator[tuple[str, list[Connection]]]:
    """The address that `count` processes share, and a pipe to each; see serve_gateway()."""
    with ExitStack() as stack:
        worker = stack.enter_context(process_of(serve_worker, steps))
        island = worker.recv()
        file, ports = GatewayFile(count, 1), SharedPorts("127.0.0.1", 0, 0)
        stack.callback(file.close)
        stack.callback(ports.close)
        one = replace(one_gateway(model), port=ports.port, http_port=ports.http_port, processes=count, table=file.path)
        each: list[GatewaySettings] = [replace(one, process=process, peer_token=PEER_TOKEN) for process in range(count)]
        pipes = [stack.enter_context(process_of(serve_gateway, settings, island)) for settings in each]
        addresses = [pipe.recv() for pipe in pipes]
        yield addresses[0].grpc, pipes


@dataclass(frozen=True)
class Window:
    """The time in which all streams run: when it began and ended, and what each gateway process had spent by then."""

    times: tuple[float, float]
    spent: tuple[list[Spent], list[Spent]]


def watch(pipes: Sequence[Connection], seconds: float) -> Window:
    times, spent = [], []
    for pause in (RAMP_SECONDS, seconds):
        time.sleep(pause)
        times.append(time.perf_counter())
        for pipe in pipes:
            pipe.send(True)
        spent.append([pipe.recv() for pipe in pipes])
    return Window((times[0], times[1]), (spent[0], spent[1]))


def numbers_of(outcome: Outcome, window: Window, steps: float) -> dict[str, float]:
    begin, end = window.times
    streams = [[at for at in one.arrivals if begin <= at < end] for one in outcome.served]
    gaps = [later - earlier for each in streams for earlier, later in itertools.pairwise(each) if later > earlier]
    tokens = sum(map(len, streams))
    before, after = window.spent
    loops = [late.loop - early.loop for early, late in zip(before, after, strict=True)]
    spent = sum(late.process - early.process for early, late in zip(before, after, strict=True))
    return {
        "tokens_s": tokens / (end - begin),
        "busiest_loop": max(loops) / (end - begin),
        "cores": spent / (end - begin),
        "token_us": spent / tokens * 1e6,
        "gap_p50_ms": percentile(gaps, 50) * 1e3,
        "gap_p99_ms": percentile(gaps, 99) * 1e3,
        "late_p99_ms": percentile(gaps, 99) * 1e3 - 1e3 / steps,
        "tokens_a_message": tokens / (len(gaps) + len(streams)),
        "clients_busy": outcome.busy,
        "fewest_tokens": min(len(each) for each in streams) / statistics.median(len(each) for each in streams),
    }


def one_round(address: str, pipes: Sequence[Connection], load: Load, clients: LoadProcesses) -> dict[str, float]:
    with ThreadPoolExecutor(1) as pool:
        window = pool.submit(watch, pipes, load.seconds)
        outcome = clients.run(load.shares(address, load.output))
    return numbers_of(outcome, window.result(), load.steps)


def measure(
    model: str, count: int, load: Load, clients: LoadProcesses, rounds: int, budget: Budget
) -> dict[str, float]:
    """Medians over the rounds."""
    with running_gateways(model, count, load.steps) as (address, pipes):
        clients.run(load.shares(address, WARM_UP_TOKENS))  # each process has opened its feed then
        rows = [one_round(address, pipes, load, clients) for _ in budget.within(range(rounds), least=1)]
    return {name: Measured.median(row[name] for row in rows) for name in rows[0]}


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    add_list(parser, "--processes", int, default=(1, 2), help="of the gateway, in turns")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=float, default=2000.0, help="a second, of all streams together")
    parser.add_argument("--window", type=float, default=4.0, help="seconds that are measured")
    parser.add_argument("--client-processes", type=int, default=2)
    parser.add_argument("--connections", type=int, help="of all clients together; a quarter of the streams by default")
    parser.add_argument("--rounds", type=int, default=2)
    add_seconds(parser)
    given = parser.parse_args()
    connections = given.connections or max(1, given.streams // 4)
    load = Load(given.streams, given.tokens, given.window, given.client_processes, connections)
    if load.output * 3 // 2 + PROMPT > MAX_MODEL_LEN:
        parser.error(
            f"--tokens {given.tokens:g} over {given.streams} streams for --window {given.window:g} s need "
            f"outputs of {load.output * 3 // 2} tokens; {MAX_MODEL_LEN - PROMPT} are the most"
        )
    budget, rows = Budget(given.seconds), dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder, LoadProcesses(given.client_processes) as clients:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        for count in given.processes:
            rows[str(count)] = measure(folder, count, load, clients, given.rounds, budget)
    sizes = {"case": f"{given.streams} streams", "connections": connections, "step_ms": 1e3 / load.steps}
    targets = targets_of(rows[str(max(given.processes))], given.tokens)
    print_result({**sizes, "processes": rows, "targets": targets}, given)


def targets_of(row: dict[str, float], tokens: float) -> list[dict[str, Any]]:
    """None on a host whose cores clients and gateway have to share."""
    if (os.cpu_count() or 1) < ENOUGH_CORES:
        return []
    return [
        at_least("tokens a second of those asked for", row["tokens_s"] / tokens, LEAST_TOKENS),
        at_most("busiest event loop, cores", row["busiest_loop"], MOST_LOOP),
        at_most("p99 gap less a step, ms", row["late_p99_ms"], MOST_LATE_MS),
    ]


if __name__ == "__main__":
    main()
