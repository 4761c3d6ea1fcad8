"""The signs of life and of progress of one process."""

import logging
from concurrent.futures import Future
from typing import Any

from tandem.cluster.config.sections import RecoverySection
from tandem.cluster.processes.processes import ActorProcess

POLL_SECONDS = 0.25
WARN_SECONDS = 15.0  # without an answer or progress, until a warning; the next ones come when that doubles
IMPORTS = "imports"
KERNELS = "kernels"  # the phase that may compile, in which the report counts ready kernels
KERNELS_WARN_SECONDS = 120.0  # some kernels take a minute to compile
MEETING = "island"  # the phase in which workers wait for each other
MEETING_SECONDS = 60.0  # it takes a second or two, and twenty more where nvcc compiles in it
log = logging.getLogger(__name__)


class Heartbeat:
    """Calls a process's ping() again and again, one call at a time.

    The answer is None, or the phase of the start and a number that changes with progress: in KERNELS, how many are
    ready. Time in which this process was itself stopped does not count, nor time in which nothing can be started.
    """

    def __init__(self, process: ActorProcess) -> None:
        self.process = process
        self.silent_seconds = 0.0  # without an answer
        self.stalled_seconds = 0.0  # without progress; imports count until the process answers
        self._there = process.there()
        self._answer: Future[Any] = process.call("ping")
        self.got_to: tuple[str, int] | None = None  # its last answer
        self._warned_seconds = 0.0

    @property
    def phase(self) -> str:
        """The phase of the start by the last answer; empty when the process starts nothing."""
        if not self._there.done():
            return IMPORTS
        return self.got_to[0] if self.got_to else ""

    def tick(self, seconds: float) -> None:
        """Counts `seconds`, the time since the last tick."""
        seconds = min(seconds, 2 * POLL_SECONDS)
        if not self._there.done():
            self.stalled_seconds += 0.0 if self.process.is_held_up else seconds
            return
        if self.process.silent_seconds:
            return  # the link is down, or its host is
        answered = self._answer.done()
        if answered and self._answer.exception() is None:
            got_to = self._answer.result()
            gets_on = got_to is None or got_to != self.got_to
            self.stalled_seconds = 0.0 if gets_on else self.stalled_seconds + seconds
            self.silent_seconds, self.got_to = 0.0, got_to
        else:
            self.silent_seconds += seconds
        if answered:
            self._answer = self.process.call("ping")

    def warn(self) -> None:
        """Logs a long silence or stall, well before excess()."""
        silent = self.silent_seconds >= self.stalled_seconds
        seconds = self.silent_seconds if silent else self.stalled_seconds
        if seconds < (KERNELS_WARN_SECONDS if self.phase == KERNELS and not silent else WARN_SECONDS):
            self._warned_seconds = 0.0
        elif seconds >= 2 * self._warned_seconds:
            self._warned_seconds = seconds
            log.warning("%s %s for %.1f s%s", self.process.name, self._complaint(silent), seconds, self._in_phase)

    def _complaint(self, silent: bool) -> str:
        if silent:
            return "has not answered"
        if self.phase == KERNELS and self.got_to:
            return f"has {self.got_to[1]} kernels and graphs ready, and has finished no other"
        return "has made no progress"

    def excess(self, recovery: RecoverySection) -> str:
        """Returns why the process must end; empty while it is within its limits."""
        if self.process.silent_seconds > recovery.cut_off_seconds:
            return (
                f"its host {self.process.host} was silent for {self.process.silent_seconds:.1f} s "
                f"(recovery.partition_seconds is {recovery.partition_seconds:g})"
            )
        if self.silent_seconds > recovery.unresponsive_seconds:
            return f"it was silent for {self.silent_seconds:.1f} s{self._in_phase}"
        limit = recovery.stalled_seconds
        if self.phase == MEETING:
            limit = min(limit, MEETING_SECONDS)
        if self.stalled_seconds > limit:
            return f"it has made no progress for {self.stalled_seconds:.1f} s{self._in_phase}"
        return ""

    @property
    def _in_phase(self) -> str:
        return f" in phase {self.phase!r} of its start" if self.phase else ""
