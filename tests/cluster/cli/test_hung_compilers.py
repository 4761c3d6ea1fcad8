"""Compilers that hang, and builders that are killed, as processes. The compiler is a script that waits for a child."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, locked
from tandem.cluster.cli.kernels.once_a_host import LOCK
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.processes import process_tree
from tandem.cluster.supervision import worker_actor
from tandem.cluster.supervision.islands.host_builds import SECTIONS
from tandem.cluster.supervision.worker_actor import WorkerActor
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.support.waiting import until

HANGS = """#!/bin/sh
if [ "$1" = --version ]; then echo 1.0; exit; fi
sleep 600 &
echo $$ $! >> "$COMPILERS"
wait
"""
WORKER = """import sys
from tandem.cluster.supervision.worker_actor import WorkerActor
print("begins", flush=True)
WorkerActor.build(None, sys.stdin.read())"""


class Compilers:
    """The compilers that run, and those that have run."""

    def __init__(self, pids: Path) -> None:
        self._pids = pids
        self._seen: set[process_tree.Process] = set()

    @property
    def begun(self) -> bool:
        for pid in map(int, self._pids.read_text().split() if self._pids.exists() else ()):
            if started := process_tree.started_at(pid):
                self._seen.add((pid, started))
        return bool(self._seen)

    @property
    def ended(self) -> bool:
        return not (self.begun and any(map(process_tree.runs, self._seen)))

    def kill(self) -> None:
        process_tree.kill(self._seen if self.begun else ())


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    for name in ("cc", "gcc", "clang"):
        (tmp_path / name).write_text(HANGS)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("COMPILERS", str(tmp_path / "pids"))
    monkeypatch.setenv(KERNEL_CACHE, str(tmp_path / "kernels"))
    there = Compilers(tmp_path / "pids")
    yield there
    there.kill()


@pytest.fixture
def order(tmp_path: Path) -> str:
    make_checkpoint(tmp_path / "model")
    return load_config(None, {"model.path": str(tmp_path / "model")}).model_dump_json(include=SECTIONS)


def start(order: str, *command: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *command], stdin=pipe, stdout=pipe, text=True, start_new_session=True, cwd=Path.cwd()
    )
    assert process.stdin is not None
    process.stdin.write(order)
    process.stdin.close()
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def is_free(lock: Path) -> bool:
    with locked(lock, 0.0) as held:
        return held


def test_a_start_goes_on_without_a_compiler_that_hangs(
    compilers: Compilers, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_actor, "BUILDER", "tests.cluster.cli.impatient_builder")
    monkeypatch.setattr(worker_actor, "BUILD_SECONDS", 60.0)
    lacking = WorkerActor.build(cast(WorkerActor, None), order)
    assert "C crew.c: no build ended for 1200 s" in lacking
    until(lambda: compilers.ended)
    assert is_free(tmp_path / "kernels" / LOCK)


def test_a_builder_that_still_imports_ends_with_its_worker(compilers: Compilers, order: str) -> None:
    worker = start(order, "-c", WORKER)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "begins\n"
        until(lambda: process_tree.children(worker.pid))
        (builder,) = process_tree.children(worker.pid)
    finally:
        end(worker)
    try:
        until(lambda: not process_tree.runs(builder) or compilers.begun)
        assert not compilers.begun
    finally:
        process_tree.kill([builder])


def test_the_compilers_of_a_killed_builder_end_and_free_their_locks(
    compilers: Compilers, order: str, tmp_path: Path
) -> None:
    builder = start(order, "-m", "tandem.cluster.cli.kernels.build_here", str(os.getpid()))
    try:
        until(lambda: compilers.begun)
        files = [*(tmp_path / "kernels").glob(".*.lock")]
        assert len(files) > 1  # LOCK, and those of files that compile
        assert not any(map(is_free, files))
    finally:
        end(builder)
    until(lambda: all(map(is_free, files)), 60.0)
    until(lambda: compilers.ended, 60.0)
