"""Settings of every test run, and fixtures that several folders use."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import tiers
from tests.support import triton_interpreter, unit_guard
from tests.support.shared_forks import share_fork_server

gc.disable()  # until tests are collected: modules that are imported stay
YOUNG_OBJECTS = 5000  # Python collects at 700, and looks through transformers and Ray each time it collects the oldest

# Ray forks its processes here while other threads use gRPC, whose handlers may abort the child before it is Ray's.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

settings.register_profile("tandem", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unit", action="store_true", help="the unit tier: neither imports nor runs other tests")


def pytest_configure(config: pytest.Config) -> None:
    share_fork_server()
    gone = tiers.missing(config.rootpath)
    assert not gone, f"{gone} are named in tests/tiers.py and are not there"
    unit_guard.install(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    left_out = config.getoption("--unit") and not tiers.is_unit(collection_path, config.rootpath)
    return True if left_out else None


def pytest_collection(session: pytest.Session) -> None:
    """Each process of several imports a part of the test files first, so that a clean clone compiles each file once."""
    config, process = session.config, getattr(session.config, "workerinput", None)
    whole = config.args == config.getini("testpaths") and not config.getoption("--unit")
    if process is None or process["workercount"] == 1 or not whole:
        return
    for path in tiers.part_of_files(config.rootpath, int(process["workerid"][2:]), process["workercount"]):
        with suppress(Exception, pytest.skip.Exception):  # collecting it raises again
            import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unused = tiers.mark_long_cases(items)
    if unused and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"markers `gate` name no case: {'; '.join(unused)}")
    if hasattr(config, "workerinput"):  # a process of several, which get files in this order
        first = {config.rootpath / name: place for place, name in enumerate((*tiers.RAY, *tiers.SLOWEST))}
        items.sort(key=lambda item: first.get(item.path, len(first)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files for each process, and all of tiers.RAY for one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "Ray" if file in tiers.RAY else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    if "triton.runtime.interpreter" in sys.modules:
        triton_interpreter.hasten()
    gc.enable()
    gc.freeze()  # all modules and tests stay: no collection looks through them again
    gc.set_threshold(YOUNG_OBJECTS)


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
