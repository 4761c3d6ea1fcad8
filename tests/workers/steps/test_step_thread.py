"""The step thread's end: every command posted to it comes to an end, whenever it was posted or cancelled."""

import ctypes
import threading
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.workers.steps import step_thread
from tandem.workers.steps.step_thread import StepThread

PR_GET_TIMERSLACK = 30


class Gate:
    """A loop whose steps wait until the test lets them end."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def step(self) -> float | None:
        self.entered.set()
        assert self.open.wait(30)
        return None


def stop_within_a_step(thread: StepThread, gate: Gate) -> None:
    """Stops the thread within a step, so that commands posted during the step are not run."""
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    while not thread._stopping:
        pass
    gate.open.set()
    stopping.join(30)
    assert not stopping.is_alive()


def stuck() -> tuple[StepThread, Gate]:
    gate = Gate()
    thread = StepThread(gate, "test")
    thread.start()
    thread.call(lambda: None)
    assert gate.entered.wait(30)
    return thread, gate


def test_many_commands_do_not_hold_up_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lasts longer than a step: there is a step between any two, and all are run in their order."""
    seen: list[str] = []
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(step_thread, "time", clock)

    class Loop:
        def step(self) -> float | None:
            seen.append("step")
            return None

    def command(name: str) -> None:
        clock.now += 2 * step_thread.LEAST_COMMAND_SECONDS
        seen.append(name)

    thread = StepThread(Loop(), "test")
    calls = [thread.call(partial(command, name)) for name in "abcd"]
    thread.start()
    for call in calls:
        call.result(30)
    thread.stop()
    assert seen[:7] == ["a", "step", "b", "step", "c", "step", "d"]


def test_commands_not_run_fail_and_cancelled_ones_stay_cancelled() -> None:
    """A server was stopped in the middle of calls: their handlers cancelled what they had posted."""
    thread, gate = stuck()
    cancelled, waiting = thread.call(lambda: None), thread.call(lambda: None)
    assert cancelled.cancel()
    failures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failures.append)
        stop_within_a_step(thread, gate)
    assert not failures
    assert cancelled.cancelled()
    assert isinstance(waiting.exception(0), RuntimeError)
    thread.stop()


def test_a_command_posted_while_the_thread_ends_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the caller's first look and its put, all of stop() may happen."""
    thread, gate = stuck()
    gate.open.set()
    put = thread._inbox.put

    class Inbox:
        def __getattr__(self, name: str) -> Any:
            return getattr(inbox, name)

        def put(self, item: tuple[Any, Future] | None) -> None:
            if item is not None:
                thread.stop()
            put(item)

    inbox = thread._inbox
    monkeypatch.setattr(thread, "_inbox", Inbox())
    assert isinstance(thread.call(lambda: None).exception(10), RuntimeError)


def test_sleeps_end_in_time() -> None:
    """The kernel may add a nanosecond, not its default of 50 µs."""
    gate = Gate()
    gate.open.set()
    thread = StepThread(gate, "test")
    thread.start()
    assert thread.call(lambda: ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK)).result(10) == 1
    thread.stop()
