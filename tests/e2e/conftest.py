"""One Ray cluster of two decode and two prefill processes, shared by all tests that need processes of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.config import load_config
from tandem.cluster.launcher import Cluster
from tandem.workers.random_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "model"
    make_checkpoint(folder, arch="llama", size="tiny", seed=3)
    return folder


@pytest.fixture(scope="session")
def cluster(small_model: Path) -> Iterator[Cluster]:
    overrides = {
        "name": f"test-{os.getpid()}",
        "model.path": str(small_model),
        "gateway.port": 0,
        "island.num_prefill": 2,
        "island.num_decode": 2,
        "island.threads_per_worker": 1,
        "cache.num_pages": 192,
        "scheduler.max_batch_tokens": 64,
        "ray.num_cpus": 2,
    }
    cluster = Cluster(load_config(None, overrides))
    cluster.start()
    yield cluster
    cluster.stop()
