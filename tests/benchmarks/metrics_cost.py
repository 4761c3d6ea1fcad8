"""Measures what metrics cost the gateway. Prints JSON.

Two gateways of one process, one with metrics and one without, and a worker that computes nothing and gives each stream
a token a step. Rounds of the same clients go to one and to the other in turns. The one with metrics is scraped every
5 s, which is three times as often as Prometheus does.

    loop_us         CPU time of the event loop a message, in microseconds
    process_us      the same of all its threads
    tokens_s        tokens a second that came to clients
    gap_p50_ms      between two messages of a stream
    ratios          with metrics ÷ without, the median over pairs of rounds
"""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tandem.cluster.config.sections import MetricsSection
from tandem.cluster.gateway.settings import GatewayAddresses, GatewaySettings
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.frontends import PROCESSES, costs_of, one_gateway, process_of, serve_gateway, serve_worker
from tests.benchmarks.load import LoadProcesses, Share
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_seconds, benchmark_parser
from tests.benchmarks.results import at_least, at_most, print_result

SCRAPE_SECONDS = 5.0
SHOWN = ("loop_us", "process_us", "tokens_s", "gap_p50_ms")
MODES = ("with", "without")
MOST = 0.02  # the part that metrics may cost


def settings(folder: str, mode: str) -> GatewaySettings:
    one = one_gateway(folder)
    metrics = MetricsSection(enabled=mode == "with")
    return replace(one, config=one.config.model_copy(update={"metrics": metrics}))


@contextmanager
def scraped(address: str) -> Iterator[None]:
    """While the block runs."""
    done = threading.Event()

    def scrape() -> None:
        while not done.wait(SCRAPE_SECONDS):
            with urlopen(f"http://{address}/metrics") as answer:
                answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def measure(clients: int, output: int, steps: float, rounds: int, budget: Budget) -> dict[str, Any]:
    return compare(settings, lambda addresses: scraped(addresses.http or ""), clients, output, steps, rounds, budget)


def compare(
    settings_of: Callable[[str, str], GatewaySettings],
    beside: Callable[[GatewayAddresses], AbstractContextManager[None]],
    clients: int,
    output: int,
    steps: float,
    rounds: int,
    budget: Budget,
) -> dict[str, Any]:
    """settings_of: of a model's folder and each of MODES. beside: what goes on while clients of `with` are served."""
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder, LoadProcesses(PROCESSES) as processes:
        make_checkpoint(Path(folder), arch="llama", size="tiny")
        with process_of(serve_worker, steps) as worker:
            island = worker.recv()
            with (
                process_of(serve_gateway, settings_of(folder, "with"), island) as one,
                process_of(serve_gateway, settings_of(folder, "without"), island) as other,
            ):
                gateways = {"with": one, "without": other}
                addresses = {mode: gateway.recv() for mode, gateway in gateways.items()}
                for number in budget.within(range(-1, rounds), least=2):
                    each = clients // PROCESSES
                    for mode in MODES if number % 2 else reversed(MODES):
                        seeds = range(number * PROCESSES, (number + 1) * PROCESSES)
                        shares = [Share(addresses[mode].grpc, 128, output, each, seed, each) for seed in seeds]
                        gateway = gateways[mode]
                        gateway.send(True)
                        before = gateway.recv()
                        with beside(addresses[mode]) if mode == "with" else nullcontext():
                            outcome = processes.run(shares)
                        gateway.send(True)
                        rows[mode].append(costs_of(outcome, before, gateway.recv()))
    measured = {
        mode: {name: Measured.median(one[name] for one in row[1:]) for name in SHOWN} for mode, row in rows.items()
    }
    pairs = list(zip(rows["with"][1:], rows["without"][1:], strict=True))
    return measured | {"ratios": {name: Measured.median(on[name] / off[name] for on, off in pairs) for name in SHOWN}}


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--output", type=int, default=128, help="mean tokens of an output")
    parser.add_argument("--steps", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--rounds", type=int, default=8)
    add_seconds(parser)
    given = parser.parse_args()
    found = measure(given.clients, given.output, given.steps, given.rounds, Budget(given.seconds))
    ratios = found["ratios"]
    targets = [
        at_most("loop time a message, with metrics ÷ without", ratios["loop_us"], 1 + MOST),
        at_least("tokens a second, with metrics ÷ without", ratios["tokens_s"], 1 - MOST),
        at_most("time a token, with metrics ÷ without", ratios["gap_p50_ms"], 1 + MOST),
    ]
    print_result(
        {"case": f"{given.clients} clients", "steps_a_second": given.steps, **found, "targets": targets}, given
    )


if __name__ == "__main__":
    main()
