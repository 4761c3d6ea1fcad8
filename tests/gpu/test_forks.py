"""A process that is forked from one with all of a GPU worker's imports can use its GPU, and leaves it when it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.cluster.processes.forks.actor_server import pack
from tandem.cluster.processes.forks.fork_server import ForkServer
from tandem.cluster.supervision.process_modules import GPU_MODULES
from tests.support.waiting import until

pytest.importorskip("flashinfer")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SECONDS = 100.0
ROOT = Path(__file__).resolve().parents[2]
HELD_BYTES = 8 << 30


class OnGpu:
    def __init__(self, size: int) -> None:
        self._size = size

    def imported(self) -> list[str]:
        """Returns the modules that were imported before the fork."""
        return [module for module in ("torch", "triton", "flashinfer", "nvshmem") if module in sys.modules]

    def count(self) -> float:
        return torch.ones(self._size, device="cuda").sum().item()

    def hold(self) -> None:
        self._held = torch.empty(HELD_BYTES, dtype=torch.uint8, device="cuda")

    def visible(self) -> int:
        return torch.cuda.device_count()


def test_imports_come_before_the_fork_and_cuda_after_it() -> None:
    server = ForkServer(["tandem.cluster.supervision.worker_actor", *GPU_MODULES])
    for size in (5, 7):
        actor = server.fork("c/worker", pack((OnGpu, size)), SECONDS)
        assert actor.call("imported").result(SECONDS) == ["torch", "triton", "flashinfer", "nvshmem"]
        assert actor.call("count").result(SECONDS) == size
        actor.kill()
    os.kill(server.pid, signal.SIGKILL)  # its spare has the imports, too, and has not touched a GPU
    actor = server.fork("c/worker", pack((OnGpu, 3)), SECONDS)
    assert actor.call("imported").result(SECONDS) == ["torch", "triton", "flashinfer", "nvshmem"]
    assert actor.call("count").result(SECONDS) == 3
    actor.kill()
    server.close()


def test_gpus_are_chosen_after_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer(["torch"])
    for gpus, number in (("", 0), ("0", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        actor = server.fork("c/worker", pack((OnGpu, 1)), SECONDS)
        assert actor.call("visible").result(SECONDS) == number
        actor.kill()
    server.close()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_gpu_is_free_when_the_process_ends_that_asked_for_its_worker(stopped: bool) -> None:
    """Also if the worker is stopped, and what has forked it is gone."""
    server = ForkServer(["torch"])
    assert server.pid
    free, _ = torch.cuda.mem_get_info()
    script = (
        "from tests.gpu.test_forks import ForkServer, OnGpu, pack\n"
        f"server = ForkServer([], address={server.address!r}); actor = server.fork('c/w', pack((OnGpu, 1)), 60)\n"
        "actor.call('hold').result(60); print(actor.pid, flush=True); actor.call('imported').result(); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert torch.cuda.mem_get_info()[0] <= free - HELD_BYTES
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            os.kill(server.pid, signal.SIGKILL)
        parent.kill()
    until(lambda: torch.cuda.mem_get_info()[0] > free - HELD_BYTES)
    server.close()
