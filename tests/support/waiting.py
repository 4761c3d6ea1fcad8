"""Waiting for what happens in another thread or process."""

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0  # on a machine that is busy with other things
POLL_SECONDS = 0.005


def until(holds: Callable[[], object]) -> None:
    """Returns once `holds` is true; AssertionError when it never is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS:g} s"
        time.sleep(POLL_SECONDS)
