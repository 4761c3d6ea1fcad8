"""The islands of deploy/ through Ray, NVSHMEM and gRPC: tokens equal transformers' in float32, and no page is lost.

Where there are fewer GPUs than workers, these share them.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.processes.ray_processes import RayProcesses
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.benchmarks.shared_gpus import SharingProcesses
from tests.support.client_requests import GREEDY, complete, complete_all, tokens_of
from tests.support.oracle import greedy, load_oracle, random_prompt

pytest.importorskip("nvshmem")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
WORKERS = {"gpu-1.yaml": 1, "gpu-1p1d.yaml": 2, "gpu-2p2d.yaml": 4, "gpu-1p3d.yaml": 4}
VOCABULARY = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "model"
    make_checkpoint(folder, arch="llama", size="tiny", seed=3)
    return folder


@pytest.fixture(scope="module", params=WORKERS)
def cluster(request: pytest.FixtureRequest, model: Path) -> Iterator[Cluster]:
    num_workers = WORKERS[request.param]
    overrides = {
        "name": f"gpu-test-{os.getpid()}",
        "model.path": str(model),
        "gateway.port": 0,
        "cache.num_pages": 1024,
        "cache.gpu_memory_utilization": None,
        "ray.num_cpus": 8,
    }
    processes = RayProcesses() if torch.cuda.device_count() >= num_workers else SharingProcesses(num_workers)
    cluster = Cluster(load_config(DEPLOY / request.param, overrides), processes)
    cluster.start()
    yield cluster
    cluster.stop()


def test_tokens_equal_transformers(cluster: Cluster, model: Path) -> None:
    oracle = load_oracle(model)
    prompts = [random_prompt(length, length, VOCABULARY) for length in (1, 15, 16, 17, 63, 64, 65, 200, 500) * 2]
    expected = [greedy(oracle, prompt, 24) for prompt in prompts]
    assert tokens_of(complete(cluster.grpc_address, prompts[3], max_tokens=24, **GREEDY)) == expected[3]
    assert complete_all(cluster.grpc_address, prompts, max_tokens=24, **GREEDY) == expected


def test_a_thousand_requests_at_once(cluster: Cluster, model: Path) -> None:
    serve_many(cluster, model, 1000)


def test_an_island_takes_another_shape(cluster: Cluster, model: Path) -> None:
    """A worker changes its role, by the same processes with the weights that they have, and changes back."""
    before = shape(cluster)
    if sum(before) <= 2:
        pytest.skip("with so few workers there is one shape")
    with Client(cluster.grpc_address) as client:
        for num_prefill, num_decode in ((3 - before[0], sum(before) - 3 + before[0]), before):
            done = client.scale(num_prefill=num_prefill, num_decode=num_decode)
            assert (done.kept, done.started, done.ended) == (sum(before), 0, 0)
            assert shape(cluster) == (num_prefill, num_decode)
            serve_many(cluster, model, 200)


def shape(cluster: Cluster) -> tuple[int, int]:
    """Prefill and decode workers."""
    with Client(cluster.grpc_address) as client:
        roles = [worker.role for worker in client.cluster_info().islands[0].workers]
    return roles.count(inference_pb2.ROLE_PREFILL), roles.count(inference_pb2.ROLE_DECODE)


def serve_many(cluster: Cluster, model: Path, count: int) -> None:
    """Requests sent at once, some of them compared with transformers' tokens; then all pages are free again."""
    oracle = load_oracle(model)
    prompts = [random_prompt(20 + number % 200, number, VOCABULARY) for number in range(count)]
    tokens = complete_all(cluster.grpc_address, prompts, max_tokens=8, **GREEDY)
    assert {len(one) for one in tokens} == {8}
    for number in range(0, count, count // 20):
        assert tokens[number] == greedy(oracle, prompts[number], 8)
    deadline = time.monotonic() + 10
    with Client(cluster.grpc_address) as client:
        while True:
            workers = client.cluster_info().islands[0].workers
            if all(worker.free_pages == worker.num_pages and not worker.draining_pages for worker in workers):
                return
            assert time.monotonic() < deadline, workers
            time.sleep(0.05)
