"""Latency and throughput of a cluster in a closed loop, as clients see them through gRPC and HTTP. Prints JSON.

So many clients have one request each under way. `tandem bench serve` has open loops, and what they say of a server's
limits. Prompts are random and all different; outputs are of unlike lengths, and whole. Per load, in ms: ttft and tpot
(time per output token after the first) at the median and the 99th percentile of the requests; gap, between two messages
with tokens, at those of all gaps; stall, the longest gap of a request. Then output tokens and requests a second, of the
whole load and of its middle half (there a request counts where its first token came), tokens a message, and busy: the
part of a core that the busiest process of clients took.

With both frontends each load goes through one after the other, and then the ratios of HTTP to gRPC are printed. Without
--address it starts a cluster, of --config or else of one prefill and one decode worker: Qwen3-8B's shape on
GPUs, a small Llama where there are none.
"""

import itertools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.settings import GatewayAddresses
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.load import LoadProcesses, Outcome, Share, numbers_of
from tests.benchmarks.measured import Measured
from tests.benchmarks.model_shapes import SHAPES, shape_name, write_shape
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.pair import DEPLOY, running_cluster
from tests.benchmarks.results import plot, print_result, rounded

MODEL = "qwen3-8b"
WARM_UP_CLIENTS = 4
CLIENTS_A_PROCESS = 16
PROCESSES = min(8, os.cpu_count() or 1)

Loads = dict[str, dict[str, float]]  # by the names of loads and of numbers


@dataclass(frozen=True)
class Size:
    """The size of the requests, and the numbers of clients that are tried."""

    prompt: int
    output: int
    requests: int
    clients: tuple[int, ...]


GPU_SIZE = Size(1024, 128, 256, (1, 16, 64, 128))
CPU_SIZE = Size(64, 32, 32, (1, 8))


class Load:
    """Loads of one size on one gateway, shared out among processes of clients."""

    def __init__(self, processes: LoadProcesses, addresses: GatewayAddresses, size: Size, seed: int) -> None:
        self._processes = processes
        self._addresses = addresses
        self._size = size
        self._seeds = itertools.count(seed << 16)

    def closed_loop(self, frontend: str, clients: int, requests: int) -> Outcome:
        count = min(PROCESSES, math.ceil(clients / CLIENTS_A_PROCESS))
        parts = zip(_split(clients, count), _split(requests, count), strict=True)
        return self._processes.run([self._share(frontend, each, few) for few, each in parts])

    def _share(self, frontend: str, requests: int, clients: int) -> Share:
        http = (self._addresses.http or "") if frontend == "http" else ""
        size = self._size
        return Share(
            self._addresses.grpc,
            size.prompt,
            size.output,
            requests,
            next(self._seeds),
            clients=clients,
            http=http,
        )


def _split(total: int, parts: int) -> list[int]:
    """Splits as evenly as possible."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def measure_all(load: Load, frontends: Sequence[str], rounds: int, size: Size, budget: Budget) -> Loads:
    """Per load and frontend its numbers, medians over the rounds."""
    results: Loads = {}
    for frontend in frontends:
        load.closed_loop(frontend, WARM_UP_CLIENTS, WARM_UP_CLIENTS)
    for clients in budget.within(size.clients):
        requests = min(size.requests, 16 * clients)
        closed = partial(load.closed_loop, clients=clients, requests=requests)
        results |= _in_turns(f"{clients} clients", frontends, rounds, closed)
    return results


def _in_turns(name: str, frontends: Sequence[str], rounds: int, run: Callable[[str], Outcome]) -> Loads:
    rows: dict[str, list[dict[str, float]]] = {frontend: [] for frontend in frontends}
    for _ in range(rounds):
        for frontend, row in rows.items():
            row.append(numbers_of(run(frontend)))
            print(f"{name}, {frontend}: {row[-1]}", file=sys.stderr, flush=True)
    return {
        f"{name}, {frontend}": {each: Measured.median(numbers[each] for numbers in row) for each in row[0]}
        for frontend, row in rows.items()
    }


def ratios_of(loads: Loads) -> Loads:
    """HTTP's numbers in gRPC's, of the loads that went through both."""
    pairs = {name: (numbers, loads.get(name.replace(", http", ", grpc"))) for name, numbers in loads.items()}
    return {
        name: {each: rounded(value / grpc[each]) for each, value in http.items() if grpc[each]}
        for name, (http, grpc) in pairs.items()
        if grpc is not None and grpc is not http
    }


def result_of(model: str, size: Size, loads: Loads) -> dict[str, Any]:
    def column(name: str) -> list[float]:
        return [numbers[name] for numbers in loads.values()]

    names = list(loads)
    return {
        "model": model,
        "prompt_tokens": size.prompt,
        "output_tokens": size.output,
        "loads": loads,
        "http_to_grpc": ratios_of(loads),
        "plots": [
            plot("time to first token", "", "ms", names, {"p50": column("ttft_p50_ms"), "p99": column("ttft_p99_ms")}),
            plot("time per token", "", "ms", names, {"p50": column("tpot_p50_ms"), "p99": column("tpot_p99_ms")}),
            plot("between messages", "", "ms", names, {"p50": column("gap_p50_ms"), "p99": column("gap_p99_ms")}),
            plot("throughput", "", "output tokens/s", names, {"tokens/s": column("tokens_s")}),
        ],
    }


@contextmanager
def cluster_for(config: str, shape: str, *, http: bool) -> Iterator[tuple[str, GatewayAddresses]]:
    """A running cluster's model name and addresses. config: a file of deploy/. http: whether both frontends serve."""
    with tempfile.TemporaryDirectory() as folder:
        if load_config(DEPLOY / config).island.device == "cuda":
            name, overrides = shape, {"model.max_model_len": 8192}
            path = write_shape(name, Path(folder))
        else:
            name, overrides = "small Llama", {"model.load_format": "safetensors"}
            path = Path(folder) / "model"
            make_checkpoint(path, arch="llama", size="small")
        overrides |= {"gateway.http_port": 0} if http else {}
        with running_cluster(config, path, overrides) as cluster:
            yield f"{name}, {config}", GatewayAddresses(cluster.grpc_address, cluster.http_address)


def gpus_of(config: str) -> int:
    """Returns the number of GPUs that a cluster of a file of deploy/ takes."""
    loaded = load_config(DEPLOY / config)
    workers = loaded.num_islands * (loaded.island.num_prefill + loaded.island.num_decode)
    return workers if loaded.island.device == "cuda" else 0


def addresses_of(address: str) -> GatewayAddresses:
    with Client(address) as client:
        return GatewayAddresses(address, client.cluster_info().http_address or None)


def main() -> None:
    on_gpus = torch.cuda.device_count() >= 2
    default = GPU_SIZE if on_gpus else CPU_SIZE
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--address", help="HOST:PORT of the gateway of a running cluster")
    parser.add_argument("--config", default="gpu-1p1d.yaml" if on_gpus else "local.yaml", help="a file of deploy/")
    parser.add_argument("--model", type=shape_name, choices=list(SHAPES), default=MODEL, help="on GPUs")
    add_list(parser, "--frontend", choices=("grpc", "http"), default=["grpc"], help="in turns")
    parser.add_argument("--rounds", type=int, default=1)
    add_list(parser, "--clients", int, nargs="*", help="numbers of clients, one closed loop each")
    parser.add_argument("--requests", type=int, default=default.requests, help="most requests of one load")
    parser.add_argument("--prompt", type=int, default=default.prompt, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=default.output, help="mean tokens of an output")
    parser.add_argument("--seed", type=int, default=0)
    add_seconds(parser)
    given = parser.parse_args()
    clients = default.clients if given.clients is None else given.clients
    size = Size(given.prompt, given.output, given.requests, tuple(clients))
    http = "http" in given.frontend
    if given.address:
        running = nullcontext((given.address, addresses_of(given.address)))
    else:
        running = cluster_for(given.config, given.model, http=http)
    with running as (model, addresses), LoadProcesses(PROCESSES) as processes:
        if http and addresses.http is None:
            parser.error(f"{given.address} has no HTTP server (gateway.http_port)")
        load = Load(processes, addresses, size, given.seed)
        loads = measure_all(load, given.frontend, given.rounds, size, Budget(given.seconds))
    case = f"{size.prompt} in, {size.output} out" + ("" if given.model == MODEL else f", {given.model}")
    print_result({"case": case, **result_of(model, size, loads)}, given, gpus=gpus_of(given.config))


if __name__ == "__main__":
    main()
