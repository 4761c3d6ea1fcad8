"""Waiting for what happens in another thread or process."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 120.0  # on a machine that is busy with other things
POLL_SECONDS = 0.005


def until(holds: Callable[[], object], patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Returns once `holds` is true; AssertionError when it never is. Asking takes at most a third of the time, because
    the awaited work may need the core."""
    deadline = time.monotonic() + patience_seconds
    while True:
        asked = time.monotonic()
        if holds():
            return
        answered = time.monotonic()
        assert answered < deadline, f"not within {patience_seconds:g} s"
        time.sleep(max(POLL_SECONDS, 2 * (answered - asked)))
