"""Settings of every test run, and fixtures that several folders use."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import triton_interpreter

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

# Whose tests wait for processes, and leave cores to others meanwhile; and those that take longest, which begin first.
WAITING = ("tests/chaos", "tests/deploy", "tests/e2e")
LONGEST = (
    "tests/e2e/test_hosts.py",
    "tests/deploy/test_several_hosts.py",
    "tests/e2e/test_partitions.py",
    "tests/chaos/test_ray_storm.py",
    "tests/e2e/test_up.py",
    "tests/e2e/test_replace.py",
    "tests/chaos/test_storm.py",
    "tests/e2e/test_speculation.py",
    "tests/deploy/test_started.py",
)

settings.register_profile("tandem", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")


def pytest_configure(config: pytest.Config) -> None:
    gone = [name for name in (*SLOW, *WAITING, *LONGEST) if not (config.rootpath / name).exists()]
    assert not gone, f"{gone} are named here and are not there"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = tuple(config.rootpath / name for name in SLOW)
    for item in items:
        if any(item.path.is_relative_to(path) for path in slow):
            item.add_marker("slow")
    if hasattr(config, "workerinput"):  # a process of several, which get files in this order
        items[:] = _mixed(config.rootpath, items)


def _mixed(root: Path, items: list[pytest.Item]) -> list[pytest.Item]:
    """Whole files: those that wait spread among those that compute, so that cores are busy all the time."""
    longest, waiting = [root / name for name in LONGEST], tuple(root / name for name in WAITING)
    files = dict.fromkeys(item.path for item in items)
    waits = [file for file in files if any(file.is_relative_to(path) for path in waiting)]
    waits.sort(key=lambda file: longest.index(file) if file in longest else len(longest))
    computes = [file for file in files if file not in waits]
    places = {file: number / len(part) for part in (waits, computes) for number, file in enumerate(part)}
    return sorted(items, key=lambda item: places[item.path])


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
