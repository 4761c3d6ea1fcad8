"""Latency and throughput of a cluster under load, as clients see them through gRPC. Prints JSON.

    closed loop   so many clients, each with one request under way
    open loop     requests arrive as a Poisson process, however many are under way

Prompts are random and all different; outputs are of unlike lengths, and whole. Per load, in ms: ttft and tpot (time per
output token after the first) at the median and the 99th percentile of the requests; gap, between two messages with
tokens, at those of all gaps; stall, the longest gap of a request. Then output tokens and requests a second, of the
whole load and of its middle half (there a request counts where its first token came), and tokens a message.

Without --address it starts a cluster, of --config or else of one prefill and one decode worker: Qwen3-8B's shape on
GPUs, a small Llama where there are none. Without --clients and --rate it tries several numbers of clients, then a rate
of LOADED times what the most of them reached.
"""

import argparse
import itertools
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.cluster.config import load_config
from tandem.workers.random_checkpoint import make_checkpoint
from tests.benchmarks.load import LoadProcesses, Served, Share
from tests.benchmarks.model_shapes import write_shape
from tests.benchmarks.pair import DEPLOY, running_cluster
from tests.benchmarks.results import percentile, plot, print_result, rounded

LOADED = 0.7
WARM_UP_CLIENTS = 4
CLIENTS_A_PROCESS = 16
PROCESSES = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Size:
    """Of the requests, and how many clients are tried."""

    prompt: int
    output: int
    requests: int
    clients: tuple[int, ...]


GPU_SIZE = Size(1024, 128, 256, (1, 16, 64, 128))
CPU_SIZE = Size(64, 32, 32, (1, 8))


class Load:
    """Loads of one size on one gateway, shared out among processes of clients."""

    def __init__(self, processes: LoadProcesses, address: str, size: Size, seed: int) -> None:
        self._processes = processes
        self._address = address
        self._size = size
        self._seeds = itertools.count(seed << 16)

    def closed_loop(self, clients: int, requests: int) -> list[Served]:
        count = min(PROCESSES, math.ceil(clients / CLIENTS_A_PROCESS))
        parts = zip(_split(clients, count), _split(requests, count), strict=True)
        return self._processes.run([self._share(each, clients=few) for few, each in parts])

    def open_loop(self, rate: float, requests: int) -> list[Served]:
        count = min(PROCESSES, math.ceil(requests / CLIENTS_A_PROCESS))
        return self._processes.run([self._share(each, rate=rate / count) for each in _split(requests, count)])

    def _share(self, requests: int, clients: int = 0, rate: float = 0.0) -> Share:
        size = self._size
        return Share(self._address, size.prompt, size.output, requests, next(self._seeds), clients, rate)


def _split(total: int, parts: int) -> list[int]:
    """As evenly as it goes."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def numbers_of(served: list[Served]) -> dict[str, float]:
    """Of one load, whichever processes it came from."""
    arrivals = [at for one in served for at in one.arrivals]
    began, ended = min(one.called for one in served), max(arrivals)
    quarter = (ended - began) / 4
    milliseconds = {
        "ttft": [one.arrivals[0] - one.called for one in served],
        "tpot": [(one.arrivals[-1] - one.arrivals[0]) / max(1, len(one.arrivals) - 1) for one in served],
        "gap": [gap for one in served for gap in one.gaps] or [0.0],
        "stall": [max(one.gaps, default=0.0) for one in served],
    }
    numbers: dict[str, float] = {"requests": len(served)}
    for name, values in milliseconds.items():
        numbers |= {f"{name}_p{share}_ms": percentile(values, share) * 1e3 for share in (50, 99)}
    for name, times in {"tokens": arrivals, "requests": [one.arrivals[0] for one in served]}.items():
        middle = [at for at in times if began + quarter <= at < ended - quarter]
        numbers |= {f"{name}_s": len(times) / (ended - began), f"middle_{name}_s": len(middle) / (2 * quarter)}
    numbers["tokens_a_message"] = len(arrivals) / sum(1 + len(one.gaps) for one in served)
    return {name: rounded(value) for name, value in numbers.items()}


def measure_all(address: str, size: Size, rate: float | None, seed: int) -> dict[str, dict[str, float]]:
    """Per load its numbers; rate None takes LOADED times that of the last closed loop."""
    results: dict[str, dict[str, float]] = {}
    with LoadProcesses(PROCESSES) as processes:
        load = Load(processes, address, size, seed)
        load.closed_loop(WARM_UP_CLIENTS, WARM_UP_CLIENTS)
        for clients in size.clients:
            requests = min(size.requests, 16 * clients)
            results[f"{clients} clients"] = numbers_of(load.closed_loop(clients, requests))
        reached = list(results.values())
        if rate is None and reached:
            rate = LOADED * reached[-1]["requests_s"]
        if rate is not None:
            results[f"{rate:.3g} requests/s"] = numbers_of(load.open_loop(rate, size.requests))
    return results


def result_of(model: str, size: Size, loads: dict[str, dict[str, float]]) -> dict[str, Any]:
    def column(name: str) -> list[float]:
        return [numbers[name] for numbers in loads.values()]

    names = list(loads)
    return {
        "model": model,
        "prompt_tokens": size.prompt,
        "output_tokens": size.output,
        "loads": loads,
        "plots": [
            plot("time to first token", "", "ms", names, {"p50": column("ttft_p50_ms"), "p99": column("ttft_p99_ms")}),
            plot("time per token", "", "ms", names, {"p50": column("tpot_p50_ms"), "p99": column("tpot_p99_ms")}),
            plot("between messages", "", "ms", names, {"p50": column("gap_p50_ms"), "p99": column("gap_p99_ms")}),
            plot("throughput", "", "output tokens/s", names, {"tokens/s": column("tokens_s")}),
        ],
    }


@contextmanager
def cluster_for(config: str) -> Iterator[tuple[str, str]]:
    """Name of the model and address of a cluster that lives as long. config: a file of deploy/."""
    with tempfile.TemporaryDirectory() as folder:
        if load_config(DEPLOY / config).island.device == "cuda":
            name, overrides = "qwen3-8b", {"model.max_model_len": 8192}
            path = write_shape(name, Path(folder))
        else:
            name, overrides = "small Llama", {"model.load_format": "safetensors"}
            path = Path(folder) / "model"
            make_checkpoint(path, arch="llama", size="small")
        with running_cluster(config, path, overrides) as cluster:
            yield f"{name}, {config}", cluster.grpc_address


def main() -> None:
    on_gpus = torch.cuda.device_count() >= 2
    default = GPU_SIZE if on_gpus else CPU_SIZE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="HOST:PORT of the gateway of a running cluster")
    parser.add_argument("--config", default="gpu-1p1d.yaml" if on_gpus else "local.yaml", help="a file of deploy/")
    parser.add_argument("--clients", type=int, nargs="*", help="numbers of clients, one closed loop each")
    parser.add_argument("--rate", type=float, help="requests a second of the open loop")
    parser.add_argument("--requests", type=int, default=default.requests, help="most requests of one load")
    parser.add_argument("--prompt", type=int, default=default.prompt, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=default.output, help="mean tokens of an output")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    clients = given.clients if given.clients is not None else () if given.rate else default.clients
    size = Size(given.prompt, given.output, given.requests, tuple(clients))
    if given.address:
        loads = measure_all(given.address, size, given.rate, given.seed)
        print_result(result_of(given.address, size, loads))
        return
    with cluster_for(given.config) as (model, address):
        loads = measure_all(address, size, given.rate, given.seed)
    print_result(result_of(model, size, loads))


if __name__ == "__main__":
    main()
