"""The way of a lone request through the processes of a cluster, without Ray.

For each point on it the median, over the rounds, of the milliseconds since the client's call; names are those of the
methods. On a CPU with a tiny model, so that control is what takes the time; with --shape, on two GPUs, with that model.
Then, of the same cluster, what ttft.py measures. Prints JSON.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.cluster.config import load_config
from tandem.cluster.launcher import Cluster
from tandem.workers.random_checkpoint import make_checkpoint
from tests.benchmarks import ttft
from tests.benchmarks.call_trace import Event, TracedProcesses, read_events
from tests.benchmarks.model_shapes import SHAPES, write_shape
from tests.benchmarks.pair import DEPLOY, Pair
from tests.benchmarks.results import print_result, rounded

OUTPUT_TOKENS = 8
WARM_UP = 3
REST_SECONDS = 0.05
ON_CPU = {"island.threads_per_worker": 1, "cache.num_pages": 512, "cache.prefix_sharing": False}


@contextmanager
def traced_cluster(shape: str | None, folder: Path, log: Path, max_length: int) -> Iterator[Cluster]:
    common = {"name": f"path-{os.getpid()}", "gateway.port": 0}
    if shape is None:
        model = folder / "model"
        make_checkpoint(model)
        config = load_config(None, common | ON_CPU | {"model.path": str(model)})
    else:
        of_model = {"model.load_format": "dummy", "model.max_model_len": max_length, "cache.prefix_sharing": False}
        path = str(write_shape(shape, folder))
        config = load_config(DEPLOY / "gpu-1p1d.yaml", common | of_model | {"model.path": path})
    cluster = Cluster(config, TracedProcesses(log))
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def measure_path(pair: Pair, log: Path, length: int, rounds: int) -> dict[str, float]:
    """Milliseconds from the client's call, in their order; an event that comes often counts the first two times."""
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds + WARM_UP):
        time.sleep(REST_SECONDS)
        prompt, began = pair.prompt(length), time.perf_counter()
        arrivals = pair.request(prompt, OUTPUT_TOKENS).arrivals
        time.sleep(REST_SECONDS)  # until the last events are written
        if number < WARM_UP:
            continue
        for name, seconds in of_one_request(read_events(log), began, began + arrivals[-1]).items():
            found[name].append(seconds * 1e3)
        for token, name in enumerate(("client: first token", "client: second token")):
            found[name].append(arrivals[token] * 1e3)
    medians = {name: rounded(statistics.median(times)) for name, times in found.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def of_one_request(events: Sequence[Event], began: float, ended: float) -> dict[str, float]:
    """Seconds since `began`; the second event of a name has an apostrophe, later ones are left out."""
    found: dict[str, float] = {}
    for event in events:
        if began <= event.seconds <= ended:
            name = f"{event.process}: {event.name}"
            found.setdefault(f"{name}'" if name in found else name, event.seconds - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[128])
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events"
        longest = max(arguments.lengths) + ttft.OUTPUT_TOKENS
        with (
            traced_cluster(arguments.shape, Path(folder), log, longest) as cluster,
            Pair(cluster.grpc_address, cluster.worker_token) as pair,
        ):
            for length in arguments.lengths:
                numbers = ttft.measure(pair, length, arguments.rounds)
                path = measure_path(pair, log, length, arguments.rounds)
                result[f"{length} tokens"] = {"ttft": numbers, "path": path}
    print_result(result)


if __name__ == "__main__":
    main()
