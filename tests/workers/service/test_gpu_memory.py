"""A worker's status has the memory that others hold of its GPU, and never waits for the driver."""

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cache.kernels.build import nvml
from tandem.cluster.metrics.cluster_series import worker_families
from tandem.proto import inference_pb2
from tandem.workers.service import gpu_memory
from tandem.workers.service.gpu_memory import GpuMemory
from tests.support.waiting import until

UUID, GIB = "GPU-5c38a034", 1 << 30


class NotFound(Exception):
    """As pynvml raises it."""


def library(own: int | None, used: int) -> Any:
    """pynvml on a host with one GPU. own: bytes of this process; None: the driver does not list it."""

    def handle(uuid: str) -> str:
        if uuid != UUID:
            raise NotFound
        return uuid

    listed = [] if own is None else [SimpleNamespace(pid=os.getpid(), usedGpuMemory=own)]
    return SimpleNamespace(
        NVMLError=NotFound,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlMemory_v2=2,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [*listed, SimpleNamespace(pid=1, usedGpuMemory=5 * GIB)],
        nvmlDeviceGetMemoryInfo=lambda _, version: SimpleNamespace(used=used + (version != 2) * GIB),
    )


@pytest.mark.parametrize(
    ("own", "uuid", "found"),
    [
        (3 * GIB, UUID, 5 * GIB),
        (3 * GIB, UUID.removeprefix("GPU-"), 5 * GIB),
        (9 * GIB, UUID, 0),
        (None, UUID, None),
        (0, UUID, None),
        (3 * GIB, "GPU-0", None),
    ],
)
def test_others_hold_what_is_in_use_and_not_this_process_own(
    own: int | None, uuid: str, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(own, used=8 * GIB))
    assert nvml.bytes_of_others(uuid) == found


def test_a_driver_that_is_stuck_keeps_no_status_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "READ_SECONDS", 0.0)
    answers, goes_on = [7, 8], threading.Event()

    def read(uuid: str) -> int:
        assert goes_on.wait(60)
        return answers.pop(0) if answers else 9

    memory = GpuMemory(UUID, read)
    before = threading.active_count()
    assert [memory.bytes_of_others() for _ in range(20)] == [None] * 20
    assert threading.active_count() == before + 1
    goes_on.set()
    until(lambda: memory.bytes_of_others() == 9)


def test_workers_without_such_a_number_have_no_series() -> None:
    cpu = inference_pb2.WorkerInfo(pe=0, alive=True)
    gpu = inference_pb2.WorkerInfo(pe=1, alive=True, gpu_bytes_of_others=0)
    families = worker_families([inference_pb2.IslandInfo(name="i", workers=[cpu, gpu])])
    (family,) = [one for one in families if one.name == "tandem:worker_gpu_bytes_of_others"]
    assert [(sample.labels["pe"], sample.value) for sample in family.samples] == [("1", 0.0)]
    assert GpuMemory(None).bytes_of_others() is None
