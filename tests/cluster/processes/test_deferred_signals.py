"""Signals that come while Ray starts."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import ray
import ray._private.utils

from tandem.cluster.processes import own_ray
from tandem.cluster.processes.ray_processes import RayProcesses


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("starts", [True, False])
def test_they_are_handled_once_it_has_started_or_failed(
    number: signal.Signals, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets a handler of its own, which nobody calls, and no further attempt is made."""
    log: list[object] = []

    def init(**options: object) -> None:
        log.append("init")
        ray._private.utils.set_sigterm_handler(lambda number, frame: log.append("Ray's"))  # type: ignore[attr-defined]
        signal.raise_signal(number)
        signal.raise_signal(number)
        log.append("still here")
        if not starts:
            raise Exception("The current node timed out during startup.")

    def handle(number: int, frame: FrameType | None) -> None:
        log.append(number)
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: log.append("shutdown"))
    processes = RayProcesses()
    before = signal.signal(number, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            processes._connect(2)
        assert signal.getsignal(number) is handle
    finally:
        signal.signal(number, before)
    assert log == ["init", "still here", *([] if starts else ["shutdown"]), number]


@pytest.mark.parametrize("address", [None, "auto"])
def test_only_a_start_of_a_ray_of_its_own_may_be_left(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GCS of a Ray that is joined is no child of this process, so it would seem to be gone."""
    watched: list[bool] = []

    @contextmanager
    def watch(fatal: object) -> Iterator[None]:
        watched.append(True)
        yield

    monkeypatch.setattr(own_ray, "_gcs_is_watched", watch)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    RayProcesses(address)._connect(2)
    assert watched == [True] * (address is None)


WAITS = """
import ctypes, signal, subprocess, sys
from tandem.cluster.processes import own_ray
own_ray.STOP_SECONDS = own_ray.LOOK_SECONDS = 0.1
gcs = subprocess.Popen([sys.argv[1], "60"])
if sys.argv[2] == "handled":
    signal.signal(signal.SIGTERM, print)
mutex = ctypes.create_string_buffer(64)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
with own_ray.deferred_signals():
    print(gcs.pid, flush=True)
    libc.pthread_mutex_lock(mutex)  # as Ray's C++ code, it returns for no signal
"""


@pytest.mark.parametrize(("handler", "status"), [("handled", 0), ("none", 128 + signal.SIGTERM)])
def test_a_start_whose_gcs_has_gone_with_the_signal_is_left(tmp_path: Path, handler: str, status: int) -> None:
    """With one line. As long as Ray's GCS runs, the start goes on to its end. A program without a handler fails."""
    shutil.copy("/bin/sleep", tmp_path / "gcs_server")
    command = [sys.executable, "-c", WAITS, str(tmp_path / "gcs_server"), handler]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    gcs = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.8)
    os.kill(gcs, signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (status, "tandem: SIGTERM: stopping, while Ray started\n")
