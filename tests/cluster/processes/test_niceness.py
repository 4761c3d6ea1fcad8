"""When the user is told that other processes of a host go first."""

import os
from concurrent.futures import Future

import pytest

from tandem.cluster.processes.process_host import ProcessHost, check_niceness


@pytest.mark.parametrize(("own", "of_raylet", "told"), [(15, 0, True), (10, 10, False), (0, 0, False), (19, 10, True)])
def test_only_what_ray_adds_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: int, of_raylet: int, told: bool
) -> None:
    """RAY_worker_niceness does not help where the whole Ray runs under `nice`."""
    asked: Future[int] = Future()
    monkeypatch.setattr(os, "getpriority", lambda which, pid: of_raylet if pid == os.getppid() else own)
    asked.set_result(ProcessHost.niceness(object.__new__(ProcessHost)))
    check_niceness(f"host-{own}-{of_raylet}", asked)
    assert [f"with niceness {own - of_raylet}," in line for line in caplog.messages] == ([True] if told else [])
