"""Workers whose steps take a least time, so that requests last long enough to be disturbed on any machine."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.workers.step_loop import StepLoop

VARIABLE = "TANDEM_TESTS_STEP_SECONDS"
STEADY = 0.003


def watch_steps() -> None:
    """In a process from which workers are forked: those that were asked for within steady() take their time."""
    step = StepLoop.step

    def steady_step(self: StepLoop) -> float | None:
        if self.num_running:
            time.sleep(float(os.environ.get(VARIABLE, 0)))
        return step(self)

    StepLoop.step = steady_step  # type: ignore[method-assign]


@contextmanager
def steady(seconds: float) -> Iterator[None]:
    """Processes that are asked for meanwhile take at least so many seconds for a step that decodes."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(seconds)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
