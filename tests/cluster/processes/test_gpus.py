"""A GPU that two processes would fill, each by what it finds free."""

import uuid
from pathlib import Path

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.processes.forks.actor_server import pack
from tandem.cluster.processes.gpus import GpuClaim
from tandem.cluster.supervision.process_settings import worker_configs
from tandem.cluster.supervision.worker_actor import WorkerActor
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.workers.worker import Worker
from tests.support.local_processes import FORK_SECONDS, fork_server


@pytest.fixture
def gpu() -> str:
    return f"GPU-{uuid.uuid4()}"


class Holder:
    def __init__(self, gpu: str) -> None:
        self._claim = GpuClaim(gpu)

    def ping(self) -> None:
        """Answered once it has it."""


def test_one_process_fills_a_gpu(gpu: str) -> None:
    holder = fork_server().fork("holder", pack((Holder, gpu)), FORK_SECONDS)
    holder.call("ping").result(FORK_SECONDS)
    with pytest.raises(ConfigError, match=rf"the GPU {gpu} is filled by process {holder.pid} already.*; give cache\."):
        GpuClaim(gpu)
    GpuClaim(f"{gpu}-another").release()
    holder.kill()
    assert holder.join(60)
    GpuClaim(gpu).release()


def test_workers_claim_what_they_measure(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "model")
    monkeypatch.setattr(Worker, "gpu", gpu)
    monkeypatch.setattr(Worker, "pages_that_fit", lambda self, utilization: 5)
    config = load_config(None, {"model.path": str(tmp_path / "model")})
    first, second = map(WorkerActor, worker_configs(config, 64))
    assert [first.pages_that_fit(0.9) for _ in range(2)] == [5, 5]
    with pytest.raises(ConfigError, match="is filled by this process already"):
        second.pages_that_fit(0.9)
    first.stop()
    assert second.pages_that_fit(0.9) == 5
    second.stop()
