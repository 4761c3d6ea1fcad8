"""Signals that come while Ray starts."""

import signal
from types import FrameType

import pytest
import ray
import ray._private.utils

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
