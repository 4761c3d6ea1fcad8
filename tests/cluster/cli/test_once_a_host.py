"""Tests which process of a host compiles, and when, with builders that only write files."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, build_once, locked
from tandem.cache.kernels.build.side_by_side import Build
from tandem.cluster.cli.kernels import build_here, builds, once_a_host
from tandem.cluster.cli.kernels.builds import Check, Running, Say
from tandem.cluster.cli.kernels.lock_holder import name_holder, write_holder
from tandem.cluster.cli.kernels.once_a_host import build_beside, build_once_a_host
from tandem.cluster.cli.kernels.plan import KernelPlan
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import UsageError
from tandem.cluster.supervision.islands.host_builds import SECTIONS
from tests.support.waiting import until

SLEEP = "import time; time.sleep(60)"
HANGS = """import time
from tandem.cache.kernels.build.side_by_side import Build
from tandem.cluster.cli.kernels.once_a_host import build_once_a_host
from tandem.cluster.cli.kernels.plan import KernelPlan

def build(*_):
    print("builds", flush=True)
    time.sleep(600)

build_once_a_host(lambda: KernelPlan((Build("a", "{}"),), ()), print, lambda: None, build)"""
WRITES = """import sys
from pathlib import Path
from tandem.cluster.cli.kernels.lock_holder import write_holder
write_holder(Path(sys.argv[1]) / ".builds.lock")"""


def unchecked() -> None:
    """No start is called off."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(KERNEL_CACHE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


class Host:
    """Two kernels, which the builder writes as files once `goes_on` is set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.built: list[str] = []
        self.goes_on = threading.Event()

    def plan(self) -> KernelPlan:
        there = [name for name in ("a", "b") if (self._folder / name).exists()]
        missing = [Build(name, "{}") for name in ("a", "b") if name not in there]
        return KernelPlan(tuple(missing), tuple(there), ("c: nvcc is not on the PATH",))

    def build(self, plan: KernelPlan, say: Say, check: Check) -> list[str]:
        assert self.goes_on.wait(30)
        for build in plan.missing:
            check()
            (self._folder / build.title).touch()
            self.built.append(build.title)
        return []


def test_one_start_of_a_host_builds_and_the_others_wait_for_it(folder: Path) -> None:
    host, said = Host(folder), list[str]()
    with ThreadPoolExecutor(3) as starts:
        lacking = [starts.submit(build_once_a_host, host.plan, said.append, unchecked, host.build) for _ in range(3)]
        until(lambda: len(said) == 2)
        assert not host.built
        host.goes_on.set()
        assert [one.result(30) for one in lacking] == [["c: nvcc is not on the PATH"]] * 3
    assert host.built == ["a", "b"]
    assert all(line.startswith("waits for ") for line in said)
    assert len(said) == 2


def test_a_start_names_the_process_that_it_waits_for_and_goes_on_when_that_dies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, said, passed = Host(folder), list[str](), list[float]()
    host.goes_on.set()
    monkeypatch.setattr(once_a_host, "time", SimpleNamespace(monotonic=lambda: sum(passed)))
    with ThreadPoolExecutor(1) as starts:
        other = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "builds\n"
            start = starts.submit(build_once_a_host, host.plan, said.append, unchecked, host.build)
            until(lambda: said)
            passed.append(once_a_host.LINE_SECONDS)
            until(lambda: len(said) == 2)
        finally:
            other.kill()
            other.communicate()
        start.result(30)
    named = f"waits for process {other.pid} of this host, which has been building kernels since 20"
    assert [line[: len(named)] for line in said] == [named] * 2
    assert [line.rpartition(": ")[2] for line in said] == [f"{one} of at most 1200 s so far" for one in (0, 60)]
    assert host.built == ["a", "b"]


def test_a_process_that_has_ended_is_not_named(folder: Path) -> None:
    """A later holder may be another user, who cannot write the file of the lock."""
    folder.mkdir()
    lock = folder / once_a_host.LOCK
    subprocess.run([sys.executable, "-c", WRITES, folder], check=True)
    assert len(lock.read_text().split()) == 3
    assert name_holder(lock) == "another process of this host, which builds kernels"
    write_holder(lock)
    assert name_holder(lock).startswith(f"process {os.getpid()} of this host")
    lock.unlink()
    assert name_holder(lock) == "another process of this host, which builds kernels"


def test_a_start_that_is_called_off_waits_no_longer(folder: Path) -> None:
    host = Host(folder)
    with ThreadPoolExecutor(1) as starts:
        first = starts.submit(build_once_a_host, host.plan, print, unchecked, host.build)
        until(lambda: (folder / once_a_host.LOCK).exists())

        def called_off() -> None:
            raise CancelledError

        with pytest.raises(CancelledError):
            build_once_a_host(host.plan, print, called_off, host.build)
        host.goes_on.set()
        first.result(30)


def test_a_host_that_has_all_takes_no_lock(folder: Path) -> None:
    host, said = Host(folder), list[str]()
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).touch()
    assert build_once_a_host(host.plan, said.append, unchecked, host.build) == ["c: nvcc is not on the PATH"]
    assert not (folder / once_a_host.LOCK).exists()


def test_a_folder_that_cannot_be_written_keeps_no_start_from_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(KERNEL_CACHE, str(tmp_path / "file" / "kernels"))
    tried: list[str] = []

    def fails(plan: KernelPlan, say: Say, check: Check) -> list[str]:
        tried.extend(build.title for build in plan.missing)
        return ["a: Not a directory"]

    assert build_once_a_host(Host(tmp_path).plan, print, unchecked, fails)[1:] == ["a: Not a directory"]
    assert tried == ["a", "b"]


class TestBeside:
    """A start goes on while a thread builds."""

    @pytest.fixture(autouse=True)
    def scripts(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Running]:
        """Builds are Python scripts."""
        running: list[Running] = []
        popen, start = subprocess.Popen, builds.start

        def start_script(build: Build, jobs: int) -> Running:
            command = [sys.executable, "-c", build.order]
            monkeypatch.setattr(builds.subprocess, "Popen", lambda _, **options: popen(command, **options))
            running.append(start(build, jobs))
            return running[-1]

        monkeypatch.setattr(once_a_host, "start", start_script)
        return running

    def plans(self, monkeypatch: pytest.MonkeyPatch, *orders: str) -> None:
        missing = tuple(Build(f"kernel {number}", order) for number, order in enumerate(orders))
        monkeypatch.setattr(once_a_host, "plan_for", lambda config: KernelPlan(missing, ()))

    def test_it_is_done_when_all_is_built_and_says_what_failed(
        self, scripts: list[Running], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.plans(monkeypatch, "import os; assert os.nice(0) >= 10", "import sys; sys.exit('nvcc: no such file')")
        said: list[str] = []
        build_beside(load_config(None, {}), said.append).result(60)
        assert [one.process.returncode for one in scripts] == [0, 1]
        assert "not built ahead: kernel 1: nvcc: no such file" in said
        assert not any("not built ahead: kernel 0" in line for line in said)

    def test_a_start_that_is_called_off_ends_the_compilers(
        self, scripts: list[Running], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.plans(monkeypatch, SLEEP)
        built = build_beside(load_config(None, {}), print)
        until(lambda: scripts)
        assert not built.done()
        assert built.cancel()
        assert scripts[0].process.wait(30) == -9
        until(lambda: "builds" not in [thread.name for thread in threading.enumerate()])

    def test_it_goes_on_without_a_compiler_that_hangs(
        self, scripts: list[Running], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.plans(monkeypatch, SLEEP)
        jumping = SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + 3600 * len(scripts))
        monkeypatch.setattr(builds, "time", jumping)
        said: list[str] = []
        build_beside(load_config(None, {}), said.append).result(60)
        assert "not built ahead: kernel 0: no build ended for 1200 s" in said
        assert scripts[0].process.returncode == -9

    def test_an_error_of_the_plan_is_the_futures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for error in (ValueError("no such type"), UsageError("this host has no GPU")):

            def plan(config: object, error: Exception = error) -> KernelPlan:
                raise error

            monkeypatch.setattr(once_a_host, "plan_for", plan)
            built = build_beside(load_config(None, {}), print)
            if isinstance(error, UsageError):  # its kernels are built at their first use
                built.result(30)
            else:
                with pytest.raises(ValueError, match="no such type"):
                    built.result(30)


def test_another_host_builds_as_the_launchers_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = load_config(None, {}).model_dump_json(include=SECTIONS)
    monkeypatch.setattr(build_here, "plan_for", lambda _: KernelPlan((Build("kernel", SLEEP),), (), ("c: no nvcc",)))

    def builder(niceness: int, stall_seconds: float, plan: KernelPlan, say: Say, check: Check) -> list[str]:
        return [f"{build.title}: niceness {niceness}" for build in plan.missing]

    monkeypatch.setattr(build_here, "build", builder)
    assert build_here.build_here(order) == ["c: no nvcc", "kernel: niceness 10"]


def test_a_file_is_made_by_one_process_and_others_wait_for_it(tmp_path: Path) -> None:
    made, goes_on = list[int](), threading.Event()

    def make(number: int, path: Path) -> None:
        made.append(number)
        assert goes_on.wait(30)
        path.write_text(str(number))

    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(build_once, tmp_path, "a.so", b"key", partial(make, number)) for number in range(3)]
        until(lambda: made)
        goes_on.set()
        (there,) = {call.result(30) for call in calls}
    assert there.read_text() == str(*made)
    assert list(tmp_path.iterdir()) == [there]


def test_a_lock_that_another_user_made_and_a_file_system_without_locks_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    lock.chmod(0o444)
    with locked(lock, 0.0) as held, locked(lock, 0.0) as again:
        assert (held, again) == (True, False)

    def flock(file: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(lock, 0.0) as held, locked(lock, 0.0) as again:
        assert held
        assert again


def test_a_build_that_fails_is_tried_by_those_who_waited(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        build_once(tmp_path, "a.so", b"key", fails)
    assert build_once(tmp_path, "a.so", b"key", lambda path: path.write_text("a")).read_text() == "a"
