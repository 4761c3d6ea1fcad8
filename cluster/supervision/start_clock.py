"""Measures the seconds of each phase between `tandem up` and ready, and tells its listeners."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

Listener = Callable[[str], None]  # called with a phase's name when it begins, from whichever thread it runs in


class StartClock:
    """The seconds of one start's phases, by name, in their order."""

    def __init__(self, listener: Listener | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.listener = listener

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.listener is not None:
            self.listener(name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - began, 3)


def phase_lines(seconds: Mapping[str, float]) -> list[str]:
    """Returns a line for each phase, and one for their sum."""
    rows = [*seconds.items(), ("in all", sum(seconds.values()))]
    return [f"{name:20}{value:8.2f} s" for name, value in rows]


def process_age() -> float:
    """Returns the seconds since this process began, to a hundredth, as Linux counts them."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime, the 22nd field; two stand before the bracket
    return round(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 3)
