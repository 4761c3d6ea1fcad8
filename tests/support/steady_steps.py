"""Workers whose steps take a least time, so that requests last long enough to be disturbed on any machine."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.workers.steps.step_loop import StepLoop

VARIABLE = "TANDEM_TESTS_STEP_SECONDS"
STEADY = 0.003


def watch_steps() -> None:
    """Slows steps in a process from which workers are forked: workers that were asked for within steady() take their
    time."""
    StepLoop.step = _slower(lambda: float(os.environ.get(VARIABLE, 0)))  # type: ignore[method-assign]


@contextmanager
def steady(seconds: float) -> Iterator[None]:
    """Makes processes that are requested meanwhile take at least so many seconds for a step that decodes."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(seconds)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


@contextmanager
def steady_here(seconds: float) -> Iterator[None]:
    """Does what steady() does, for workers of this process."""
    step = StepLoop.step
    StepLoop.step = _slower(lambda: seconds)  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepLoop.step = step  # type: ignore[method-assign]


def _slower(least: Callable[[], float]) -> Callable[[StepLoop], float | None]:
    """Makes a step that sleeps before it decodes."""
    step = StepLoop.step

    def slower_step(self: StepLoop) -> float | None:
        if self.num_running:
            time.sleep(least())
        return step(self)

    return slower_step
