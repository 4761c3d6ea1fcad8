"""Islands of one worker on Ray nodes of one host, each with its own GPU and its share of the load, against one island
alone. Prints JSON.

clients n    a closed loop of n clients for each island; outputs are whole, prompts random and all different
    alone, together    of one island, and of one on each node: ms to the first token and for a token after it at the
                       median, output tokens a second and island
    to_alone           together ÷ alone

Each Ray node sees a GPU of its own. Without GPUs all share the processor, which says nothing about islands.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ray.cluster_utils import Cluster as RayCluster

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.gateway.settings import GatewayAddresses
from tandem.cluster.processes.own_ray import SETTINGS
from tandem.cluster.processes.ray_processes import RayProcesses
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.load import LoadProcesses, numbers_of
from tests.benchmarks.model_shapes import SHAPES, shape_name, write_shape
from tests.benchmarks.options import add_list, benchmark_parser
from tests.benchmarks.pair import DEPLOY
from tests.benchmarks.results import at_least, at_most, print_result, rounded
from tests.benchmarks.serving import CPU_SIZE, GPU_SIZE, PROCESSES, WARM_UP_CLIENTS, Load, Size

MODEL = "qwen3-8b"
ISLANDS = 2
SLOWER = 1.02
CLIENTS = (1, 16, 64)
NUMBERS = {"ttft_p50_ms": "first token, ms", "tpot_p50_ms": "token, ms", "tokens_s": "tokens/s"}
Numbers = dict[str, dict[str, float]]  # by clients and by the values of NUMBERS


@contextmanager
def ray_nodes(*, gpus: bool) -> Iterator[str]:
    """The address of a Ray with a node for each island, on this host."""
    nodes = [
        {
            "num_cpus": max(2, (os.cpu_count() or 2) // ISLANDS),
            "num_gpus": int(gpus),
            "env_vars": SETTINGS | ({"CUDA_VISIBLE_DEVICES": str(number)} if gpus else {}),
            "include_dashboard": False,
        }
        for number in range(ISLANDS)
    ]
    ray = RayCluster(initialize_head=True, head_node_args=nodes[0])
    try:
        for node in nodes[1:]:
            ray.add_node(**node)
        assert ray.address, "the head has one"
        yield ray.address
    finally:
        ray.shutdown()


def measure(address: str, islands: int, model: Path, size: Size, roles: str, *, gpus: bool) -> Numbers:
    """Measures a cluster of so many islands, each of which gets size.clients."""
    overrides: dict[str, Any] = {
        "name": f"bench-{os.getpid()}-{islands}",
        "gateway.port": 0,
        "model.path": str(model),
        "num_islands": islands,
        "island.num_prefill": 0,
        "scheduler.roles": roles,
        "model.load_format": "dummy" if gpus else "safetensors",
    }
    overrides |= {"model.max_model_len": 8192} if gpus else {}
    config = load_config(DEPLOY / ("gpu-1.yaml" if gpus else "local.yaml"), overrides)
    cluster, found = Cluster(config, RayProcesses(address)), Numbers()
    cluster.start()
    try:
        with LoadProcesses(PROCESSES) as processes:
            load = Load(processes, GatewayAddresses(cluster.grpc_address, None), size, seed=islands)
            load.closed_loop("grpc", WARM_UP_CLIENTS * islands, WARM_UP_CLIENTS * islands)
            for clients in size.clients:
                requests = islands * min(size.requests, 16 * clients)
                numbers = numbers_of_island(load, clients * islands, requests, islands)
                found[f"clients {clients}"] = numbers
    finally:
        cluster.stop()
    return found


def numbers_of_island(load: Load, clients: int, requests: int, islands: int) -> dict[str, float]:
    numbers = numbers_of(load.closed_loop("grpc", clients, requests))
    numbers["tokens_s"] /= islands
    return {title: rounded(numbers[name]) for name, title in NUMBERS.items()}


def compared(alone: Numbers, together: Numbers) -> dict[str, Any]:
    return {
        name: {
            "alone": numbers,
            "together": together[name],
            "to_alone": {title: rounded(together[name][title] / value) for title, value in numbers.items()},
        }
        for name, numbers in alone.items()
    }


def targets_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    targets = []
    for name, result in results.items():
        ratios: dict[str, float] = result["to_alone"]
        for title, ratio in ratios.items():
            label = f"{name}, {title}, together ÷ alone"
            targets.append(at_least(label, ratio, 1 / SLOWER) if title == "tokens/s" else at_most(label, ratio, SLOWER))
    return targets


def main() -> None:
    gpus = torch.cuda.device_count() >= ISLANDS
    size = GPU_SIZE if gpus else CPU_SIZE
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--model", type=shape_name, choices=list(SHAPES), default=MODEL, help="on GPUs")
    parser.add_argument("--roles", default="adaptive", choices=("adaptive", "colocated"))
    add_list(parser, "--clients", int, default=CLIENTS if gpus else size.clients, help="of each island")
    parser.add_argument("--requests", type=int, default=size.requests, help="most requests of one load and island")
    options = parser.parse_args()
    size = Size(size.prompt, size.output, options.requests, tuple(options.clients))
    with tempfile.TemporaryDirectory() as folder:
        if gpus:
            model = write_shape(options.model, Path(folder))
        else:
            model = Path(folder) / "model"
            make_checkpoint(model, arch="llama", size="small")
        with ray_nodes(gpus=gpus) as address:
            alone, together = (
                measure(address, islands, model, size, options.roles, gpus=gpus) for islands in (1, ISLANDS)
            )
    results = compared(alone, together)
    targets = targets_of(results) if gpus else []
    print_result({"roles": options.roles, **results, "targets": targets}, options, gpus=ISLANDS * gpus)


if __name__ == "__main__":
    main()
