"""A process that is forked from one with all of a GPU worker's imports can use its GPU."""

import sys

import pytest
import torch

from tandem.cluster.processes.forks.actor_server import pack
from tandem.cluster.processes.forks.fork_server import ForkServer
from tandem.cluster.supervision.process_modules import GPU_MODULES

pytest.importorskip("flashinfer")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SECONDS = 100.0


class OnGpu:
    def __init__(self, size: int) -> None:
        self._size = size

    def imported(self) -> list[str]:
        """What was there before the fork."""
        return [module for module in ("torch", "triton", "flashinfer", "nvshmem") if module in sys.modules]

    def count(self) -> float:
        return torch.ones(self._size, device="cuda").sum().item()


def test_imports_come_before_the_fork_and_cuda_after_it() -> None:
    server = ForkServer(["tandem.cluster.supervision.worker_actor", *GPU_MODULES])
    for size in (5, 7):
        actor = server.fork("c/worker", pack((OnGpu, size)), SECONDS)
        assert actor.call("imported").result(SECONDS) == ["torch", "triton", "flashinfer", "nvshmem"]
        assert actor.call("count").result(SECONDS) == size
        actor.kill()
    server.close()
