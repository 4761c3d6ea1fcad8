"""The one thread of a worker that touches its cache, its device and its transport."""

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

PR_SET_TIMERSLACK = 29
LEAST_COMMAND_SECONDS = 0.001


class Steps(Protocol):
    def step(self) -> float | None:
        """Does one step of work. Returns how long the thread may then wait for a command: 0 if there is more work now,
        seconds if it polls for something, None if only a command can bring work."""
        ...


class StepThread:
    """Runs steps, and between its steps the commands that other threads post: for as long as the last step took,
    or a millisecond, so that many at once do not hold a step up. The rest comes behind the next one.

    call() may be used from any thread; the command runs on the step thread, in the order posted, and its result or
    exception is in the future. After stop() every command not yet run fails with RuntimeError.
    """

    def __init__(self, steps: Steps, name: str) -> None:
        self._steps = steps
        self._inbox: queue.SimpleQueue[tuple[Callable[[], object], Future] | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, command: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()
        self._inbox.put((command, future))
        if self._stopping and not self._thread.is_alive():  # stop() may have looked before the command was there
            self._fail_rest()
        return future

    def stop(self, timeout: float = 30.0) -> None:
        """Ends the thread after the step in progress; idempotent. Raises TimeoutError if that takes longer."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the step thread did not end within {timeout} s")
        self._fail_rest()

    def _run(self) -> None:
        # Linux ends a thread's sleeps up to 50 µs late unless told otherwise; loops poll more often than that.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1))
        wait: float | None = None
        began = ended = time.monotonic()  # of the last step
        while not self._stopping:
            self._run_commands(wait, max(LEAST_COMMAND_SECONDS, ended - began))
            if self._stopping:
                return
            began = time.monotonic()
            try:
                wait = self._steps.step()
            except Exception:
                # A loop answers for its requests itself; what reaches this line is a defect, and must not spin.
                log.exception("step failed")
                wait = 1.0
            ended = time.monotonic()

    def _run_commands(self, wait: float | None, seconds: float) -> None:
        """Runs the commands that are there or come within `wait`. Begins none after `seconds` of commands."""
        try:
            item = self._inbox.get(block=wait != 0, timeout=wait)
            until = time.monotonic() + seconds
            while item is not None:
                command, future = item
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(command())
                    except BaseException as error:
                        future.set_exception(error)
                if time.monotonic() >= until:
                    return
                item = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _fail_rest(self) -> None:
        """Fails the commands that are left. Any thread may call it, once the step thread has ended."""
        with suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if item is not None and item[1].set_running_or_notify_cancel():
                    item[1].set_exception(RuntimeError("the worker is stopping"))
