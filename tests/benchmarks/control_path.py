"""The way of a lone request through a cluster's processes, without Ray, and what a head start is worth. Prints JSON.

In every round one prompt goes to the prefill worker alone (local, as in ttft.py), one through the gateway, and one
through a gateway that announces nothing: then the prefill worker does not hear of a prompt before there is room for it.
Medians over the rounds, in milliseconds:

    first_less_local, handoff_less_step     as in ttft.py
    path                                    since the client's call, when methods on the way begin and end

On a CPU with a tiny model, so that control is what takes the time; with --shape, on two GPUs, with that model.
"""

import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks import measured
from tests.benchmarks.call_trace import Event, TracedProcesses, read_events
from tests.benchmarks.model_shapes import SHAPES, shape_name, write_shape
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.pair import DEPLOY, Pair
from tests.benchmarks.results import print_result, rounded

OUTPUT_TOKENS = 16
WARM_UP = 1
WAYS = {"not announced": False, "announced": True}
REST_SECONDS = 0.1
ON_CPU = {"island.threads_per_worker": 1, "cache.num_pages": 512}


@dataclass
class Measured:
    """Seconds. first, second, step: of the tokens, since the client's call; path: times by the names of events."""

    local: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    second: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    path: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def summary(self) -> dict[str, object]:
        rounds = list(zip(self.local, self.first, self.second, self.step, strict=True))
        path = {name: _median_ms(times) for name, times in self.path.items()}
        return {
            "local": _median_ms(self.local),
            "first_less_local": _median_ms([first - local for local, first, _, _ in rounds]),
            "handoff_less_step": _median_ms([second - local - step for local, _, second, step in rounds]),
            "second_gap_to_step": rounded(
                statistics.median((second - first) / step for _, first, second, step in rounds)
            ),
            "path": dict(sorted(path.items(), key=lambda item: item[1])),
        }


@contextmanager
def traced_cluster(shape: str | None, folder: Path, processes: TracedProcesses, longest: int) -> Iterator[Cluster]:
    common = {
        "name": f"path-{os.getpid()}",
        "gateway.port": 0,
        "cache.prefix_sharing": False,
        "scheduler.roles": "split",
    }
    if shape is None:
        make_checkpoint(folder / "model")
        config = load_config(None, common | ON_CPU | {"model.path": str(folder / "model")})
    else:
        of_model = {"model.path": str(write_shape(shape, folder)), "model.load_format": "dummy"}
        of_model |= {"scheduler.max_sequences": 16}  # few graphs to capture
        config = load_config(DEPLOY / "gpu-1p1d.yaml", common | of_model | {"model.max_model_len": longest})
    cluster = Cluster(config, processes)
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


class Bench:
    def __init__(self, pair: Pair, processes: TracedProcesses, log: Path) -> None:
        self._pair = pair
        self._processes = processes
        self._log = log

    def measure(self, length: int, rounds: int) -> dict[str, Measured]:
        found = {way: Measured() for way in WAYS}
        for number in range(rounds + WARM_UP):
            self._heat(length)
            local = self._pair.prefill(self._pair.prompt(length), push=False).seconds
            for way, announced in WAYS.items():
                self._processes.announcements(announced)
                self._heat(length)
                self._request(length, local, found[way] if number >= WARM_UP else Measured())
        return found

    def _heat(self, length: int) -> None:
        """See ttft.py: all ways need the same past."""
        time.sleep(REST_SECONDS)
        self._pair.prefill(self._pair.prompt(length), push=False)

    def _request(self, length: int, local: float, into: Measured) -> None:
        os.truncate(self._log, 0)
        prompt, began = self._pair.prompt(length), time.perf_counter()
        times = self._pair.request(prompt, OUTPUT_TOKENS).arrivals
        time.sleep(REST_SECONDS / 2)  # until the last events are written
        into.local.append(local)
        into.first.append(times[0])
        into.second.append(times[1])
        into.step.append((times[-1] - times[1]) / (len(times) - 2))
        for name, seconds in of_one_request(read_events(self._log), began).items():
            into.path[name].append(seconds)
        into.path["client: first token"].append(times[0])
        into.path["client: second token"].append(times[1])


def of_one_request(events: Sequence[Event], began: float) -> dict[str, float]:
    """Seconds since `began`; the second event of a name has an apostrophe, later ones are left out."""
    found: dict[str, float] = {}
    for event in (event for event in events if event.seconds >= began):
        name = f"{event.process}: {event.name}"
        found.setdefault(f"{name}'" if name in found else name, event.seconds - began)
    return found


def _median_ms(seconds: Sequence[float]) -> float:
    return measured.Measured.median(seconds, 1e3)


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--shape", type=shape_name, choices=sorted(SHAPES))
    add_list(parser, "--lengths", int, default=[128])
    parser.add_argument("--rounds", type=int, default=20)
    add_seconds(parser)
    options = parser.parse_args()
    budget = Budget(options.seconds)
    result: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events"
        processes = TracedProcesses(log)
        longest = max(options.lengths) + OUTPUT_TOKENS
        with (
            traced_cluster(options.shape, Path(folder), processes, longest) as cluster,
            Pair(cluster.grpc_address, cluster.worker_token) as pair,
        ):
            for length in budget.within(options.lengths):
                found = Bench(pair, processes, log).measure(length, options.rounds)
                result[f"{length} tokens"] = {way: one.summary() for way, one in found.items()}
                print(result[f"{length} tokens"], file=sys.stderr, flush=True)  # in case there is no time for the rest
    case = {"case": options.shape} if options.shape else {}
    print_result({**result, **case}, options, gpus=2 if options.shape else 0)


if __name__ == "__main__":
    main()
