"""Measures what adding a LoRA adapter costs the streams that run meanwhile, in a cluster of processes. Prints JSON.

Streams of one client decode without a pause. Windows take turns: in a quiet one nothing happens, in the other an
adapter is added, answers one request, and is removed. A gap is the time between two messages of a stream. A window of
its own length is quiet, so that machine noise is in both.

    gap_p50_ms, gap_p99_ms, gap_max_ms    by kind of window
    add_ms                                from the call to its answer
    ratios                                windows with an addition ÷ quiet ones
"""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.measured import Measured
from tests.benchmarks.options import Budget, add_seconds, benchmark_parser
from tests.benchmarks.results import at_most, percentile, print_result
from tests.support.adapters import save_adapter
from tests.support.client_requests import GREEDY
from tests.support.local_processes import LocalProcesses
from tests.support.oracle import load_oracle, random_prompt

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
QUIET, ADDING = "quiet", "adding"
WINDOW_SECONDS = 2.0
LIMIT = 1.2  # the longest usual gap beside an addition ÷ without
OUTPUT, PROMPT_TOKENS = 400, 32


@dataclass
class Gaps:
    """The gaps of all streams, by the kind of window that they end in."""

    kind: str = ""  # of the window now; none counts before the first
    seconds: dict[str, list[float]] = field(default_factory=lambda: {QUIET: [], ADDING: []})
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, address: str, seed: int) -> None:
        with Client(address) as client:
            while not self.done.is_set():
                prompt = random_prompt(PROMPT_TOKENS, seed, 512)
                last = 0.0
                for _ in client.generate(prompt, max_tokens=OUTPUT, **GREEDY):
                    now = time.perf_counter()
                    if last and self.kind:
                        self.seconds[self.kind].append(now - last)
                    last = now
                    if self.done.is_set():
                        return


@contextmanager
def streaming(address: str, streams: int) -> Iterator[Gaps]:
    gaps = Gaps()
    threads = [threading.Thread(target=gaps.run, args=(address, seed)) for seed in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield gaps
    finally:
        gaps.done.set()
        for thread in threads:
            thread.join()


def measure(streams: int, rank: int, rounds: int, size: str, budget: Budget) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given).resolve()
        make_checkpoint(folder / "model", arch="llama", size="tiny" if size == "tiny" else "small")
        oracle = load_oracle(folder / "model")
        for number in range(rounds):
            save_adapter(oracle, folder / "adapters" / str(number), LINEAR, rank=rank, seed=number)
        settings = {
            "model.path": str(folder / "model"),
            "island.threads_per_worker": 1,
            "gateway.port": 0,
            "adapters.max_resident": 2,
            "adapters.max_rank": rank,
            "adapters.allowed_root": str(folder / "adapters"),
        }
        cluster = Cluster(load_config(None, settings), LocalProcesses())
        try:
            return _windows(cluster.start(), folder / "adapters", streams, rounds, budget)
        finally:
            cluster.stop()


def _windows(address: str, folder: Path, streams: int, rounds: int, budget: Budget) -> dict[str, Any]:
    took: list[float] = []
    with streaming(address, streams) as gaps, Client(address) as client:
        time.sleep(WINDOW_SECONDS)
        for number in budget.within(range(rounds), least=2):
            for kind in (QUIET, ADDING) if number % 2 else (ADDING, QUIET):
                gaps.kind, ends = kind, time.perf_counter() + WINDOW_SECONDS
                if kind == ADDING:
                    began = time.perf_counter()
                    client.add_adapter("added", str(folder / str(number)))
                    took.append(time.perf_counter() - began)
                    list(client.generate(random_prompt(PROMPT_TOKENS, 99, 512), max_tokens=1, model="added", **GREEDY))
                    client.remove_adapter("added")
                time.sleep(max(0.0, ends - time.perf_counter()))
        gaps.kind = ""
    found = {
        kind: {
            "gaps": len(seconds),
            "gap_p50_ms": 1e3 * percentile(seconds, 50),
            "gap_p99_ms": 1e3 * percentile(seconds, 99),
            "gap_max_ms": 1e3 * max(seconds),
        }
        for kind, seconds in gaps.seconds.items()
    }
    ratios = {name: found[ADDING][name] / found[QUIET][name] for name in ("gap_p50_ms", "gap_p99_ms", "gap_max_ms")}
    return {"windows": found, "add_ms": Measured.median([1e3 * one for one in took]), "ratios": ratios}


def main(arguments: list[str] | None = None) -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--size", default="small", choices=["tiny", "small"])
    add_seconds(parser)
    given = parser.parse_args(arguments)
    found = measure(given.streams, given.rank, given.rounds, given.size, Budget(given.seconds))
    targets = [at_most("p99 of gaps beside an addition ÷ quiet", found["ratios"]["gap_p99_ms"], LIMIT)]
    print_result(
        {"streams": given.streams, "rank": given.rank, "model": given.size, **found, "targets": targets}, given
    )


if __name__ == "__main__":
    main()
