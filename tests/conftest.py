"""Settings of every test run, and fixtures that several folders use."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Ray forks its processes here while other threads use gRPC, whose handlers may abort the child before it is Ray's.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

settings.register_profile("tandem", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")


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
