"""Settings of every test run, and fixtures that several folders use."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import triton_interpreter
from tests.support.shared_forks import share_fork_server

gc.disable()  # until tests are collected: modules that are imported stay

# Ray forks its processes here while other threads use gRPC, whose handlers may abort the child before it is Ray's.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

# What `make test-fast` leaves out: clusters, compilers, storms, long random programs. A folder, or a file.
SLOW = (
    "tests/chaos",
    "tests/e2e",
    "tests/fuzz",
    "tests/protocol",
    "tests/cache/kernels/test_append_registers.py",
    "tests/cache/kernels/test_decode_programs.py",
    "tests/cache/kernels/test_native_kernels.py",
    "tests/cache/operations/test_programs.py",
    "tests/cluster/cli/bench/test_checkout.py",
    "tests/cluster/cli/bench/test_load.py",
    "tests/cluster/cli/test_random_checkpoint.py",
    "tests/cluster/frontends/test_large_requests.py",
    "tests/cluster/processes",
    "tests/cluster/requests/test_answers.py",
    "tests/cluster/requests/test_readers.py",
    "tests/cluster/requests/test_replay.py",
    "tests/deploy/test_several_hosts.py",
    "tests/deploy/test_started.py",
    "tests/deploy/test_wheel.py",
    "tests/transfer/nvshmem/test_triton_push.py",
    "tests/transfer/test_shared_memory.py",
    "tests/workers/kernels/test_cubin_build.py",
    "tests/workers/kernels/test_logits_registers.py",
    "tests/workers/kernels/test_megakernel.py",
    "tests/workers/kernels/test_resident_gemm.py",
    "tests/workers/models/test_weights.py",
    "tests/workers/runner/test_logits_processor.py",
    "tests/workers/sampling/test_triton_sampling.py",
    "tests/workers/service/test_hung_gateway.py",
)

# Whose tests start a Ray, or several: one process has them all, so that no two clusters start at a time. And others
# that take long. Both begin first.
RAY = (
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_partitions.py",
    "tests/deploy/test_several_hosts.py",
    "tests/e2e/test_up.py",
    "tests/e2e/test_replace.py",
    "tests/chaos/test_ray_storm.py",
    "tests/e2e/test_launch.py",
    "tests/deploy/test_started.py",
    "tests/e2e/test_interrupted_start.py",
    "tests/e2e/test_operator.py",
    "tests/cluster/processes/test_ray_processes.py",
    "tests/cluster/processes/test_ray_watch.py",
)
LONG = (
    "tests/e2e/test_parity.py",
    "tests/protocol/test_explorer.py",
    "tests/cache/operations/test_programs.py",
    "tests/chaos/test_storm.py",
    "tests/workers/kernels/test_megakernel.py",
    "tests/e2e/test_speculation.py",
    "tests/e2e/test_recovery.py",
)

settings.register_profile("tandem", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")


def pytest_configure(config: pytest.Config) -> None:
    share_fork_server()
    gone = [name for name in (*SLOW, *RAY, *LONG) if not (config.rootpath / name).exists()]
    assert not gone, f"{gone} are named here and are not there"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    files = {item.path for item in items}
    slow = {file for file in files for name in SLOW if file.is_relative_to(config.rootpath / name)}
    for item in items:
        if item.path in slow:
            item.add_marker("slow")
    if hasattr(config, "workerinput"):  # a process of several, which get files in this order
        first = {config.rootpath / name: place for place, name in enumerate((*RAY, *LONG))}
        items.sort(key=lambda item: first.get(item.path, len(first)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files for each process, and all of RAY for one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "Ray" if file in RAY else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    if "triton.runtime.interpreter" in sys.modules:
        triton_interpreter.hasten()
    gc.enable()
    gc.freeze()  # all modules and tests stay: no collection looks through them again


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries complain of what they find left at the end


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors here are so small that threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runtime folder of its own, for this process and the ones it starts."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "tandem"
