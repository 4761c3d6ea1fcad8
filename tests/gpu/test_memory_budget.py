"""gpu_memory_utilization on two GPUs: a running cluster uses what it may, and what cannot be is said.

A budget counts whatever else is in use on the GPU, so this needs GPUs that nobody else works on.
"""

import os
from pathlib import Path

import pytest
import torch

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError, StartFailed
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.support.client_requests import GREEDY, complete, tokens_of
from tests.support.oracle import greedy, load_oracle, random_prompt

pytest.importorskip("nvshmem")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "gpu-1p1d.yaml"
VOCABULARY = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget") / "model"
    make_checkpoint(folder, arch="llama", size="tiny", seed=3)
    return folder


def make_cluster(model: Path, overrides: dict[str, object]) -> Cluster:
    common = {"name": f"budget-{os.getpid()}", "model.path": str(model), "gateway.port": 0, "ray.num_cpus": 8}
    return Cluster(load_config(CONFIG, common | overrides))


def test_a_pool_fills_what_it_may_and_serves_from_all_of_it(model: Path) -> None:
    utilization = 0.4
    cluster = make_cluster(model, {"cache.gpu_memory_utilization": utilization, "cache.page_size": 64})
    try:
        address = cluster.start()
        prompt = random_prompt(300, 1, VOCABULARY)
        assert tokens_of(complete(address, prompt, max_tokens=8, **GREEDY)) == greedy(load_oracle(model), prompt, 8)
        with Client(address) as client:
            pages = {worker.num_pages for worker in client.cluster_info().islands[0].workers}
        assert len(pages) == 1
        for device in range(2):
            free, total = torch.cuda.mem_get_info(device)
            assert 0.9 * utilization * total < total - free <= utilization * total
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    ("overrides", "error", "named"),
    [
        ({"cache.gpu_memory_utilization": 0.01}, StartFailed, "gpu_memory_utilization is 0.01"),
        ({"cache.gpu_memory_utilization": 0.5, "cache.num_pages": 10}, ConfigError, "null where cache.num_pages"),
    ],
)
def test_what_cannot_be_is_said(model: Path, overrides: dict[str, object], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        make_cluster(model, overrides).start()
