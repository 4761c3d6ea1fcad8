"""A start of Ray that fails."""

import logging
import subprocess
import sys

import pytest
import ray

from tandem.cluster.errors import StartFailed
from tandem.cluster.processes import own_ray
from tandem.cluster.processes.own_ray import OwnRay


class SlowRay:
    """Raises `failures` times, as Ray does where its own processes are too slow, and leaves a process each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self._failures = failures
        self.started: list[subprocess.Popen[bytes]] = []
        monkeypatch.setattr(ray, "init", self._init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        monkeypatch.setattr(own_ray, "PAUSE_SECONDS", 0.0)

    def _init(self, **options: object) -> None:
        assert options["address"] == "local"
        self.started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        if len(self.started) <= self._failures:
            raise Exception("The current node timed out during startup.\nMore of it.")

    def end(self) -> None:
        for one in self.started:
            one.communicate(timeout=30)


def test_it_is_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowRay(monkeypatch, failures=2)
    with caplog.at_level(logging.WARNING):
        started = OwnRay(2, {})
    assert len(slow.started) == 3
    assert caplog.messages[1].startswith(
        "Ray did not start, attempt 2 of 3: The current node timed out during startup."
    )
    started.end()
    slow.end()
    assert [one.returncode for one in slow.started] == [-9] * 3


def test_the_error_says_how_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowRay(monkeypatch, failures=100)
    with pytest.raises(StartFailed) as failed:
        OwnRay(2, {})
    slow.end()
    assert [one.returncode for one in slow.started] == [-9] * own_ray.ATTEMPTS
    said = str(failed.value)
    assert said.startswith("a local Ray cannot be started, in 3 attempts: The current node timed out during startup.; ")
    assert "load average " in said
    assert " cores, " in said
    assert " GiB of memory and " in said


def test_what_ray_refuses_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def init(**options: object) -> None:
        calls.append(options)
        raise ValueError("num_cpus is negative")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(StartFailed, match="num_cpus is negative"):
        OwnRay(-1, {})
    assert len(calls) == 1
