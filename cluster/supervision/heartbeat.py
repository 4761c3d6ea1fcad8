"""What one process says of itself: that it lives, and how far its start is."""

import logging
from concurrent.futures import Future
from typing import Any

from tandem.cluster.config import RecoverySection
from tandem.cluster.processes.processes import ActorProcess

POLL_SECONDS = 0.25
TOLD_SECONDS = (
    15.0  # who has been silent, or has not got on, for so long is named in the log, and whenever that doubles
)
IMPORTS = "imports"
MEETING = "island"  # the phase in which workers wait for each other
MEETING_SECONDS = 60.0  # it takes a second or two, and twenty more where nvcc compiles in it
log = logging.getLogger(__name__)


class Heartbeat:
    """One question at a time to one process: ping(). It answers None, or, while it prepares something, the phase of its
    start and a number; that answer changes when it has got on.

    Only what this process has seen counts: when it was itself stopped for a while, nobody was silent meanwhile.
    silent_seconds: without an answer, since the process was there or had answered. stalled_seconds: how long it has
    prepared something and not got on; until it is there, its imports are that. got_to: its last answer.
    """

    def __init__(self, process: ActorProcess) -> None:
        self.process = process
        self.silent_seconds = 0.0
        self.stalled_seconds = 0.0
        self._there = process.there()
        self._answer: Future[Any] = process.call("ping")
        self.got_to: tuple[str, int] | None = None
        self._told_seconds = 0.0

    @property
    def phase(self) -> str:
        """Of its start, as last heard; empty when it prepares nothing."""
        if not self._there.done():
            return IMPORTS
        return self.got_to[0] if self.got_to else ""

    def tick(self, seconds: float) -> None:
        """seconds have passed since the last tick."""
        seconds = min(seconds, 2 * POLL_SECONDS)
        if not self._there.done():
            self.stalled_seconds += seconds
            return
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

    def tell(self) -> None:
        """Logs what has lasted too long to be usual, in good time before excess()."""
        silent = self.silent_seconds >= self.stalled_seconds
        seconds = self.silent_seconds if silent else self.stalled_seconds
        if seconds < TOLD_SECONDS:
            self._told_seconds = 0.0
        elif seconds >= 2 * self._told_seconds:
            self._told_seconds = seconds
            what = "has not answered" if silent else "has not got on"
            log.warning("%s %s for %.1f s%s", self.process.name, what, seconds, self._in_phase)

    def excess(self, recovery: RecoverySection) -> str:
        """Why the process is to be ended; empty while it is within its limits."""
        if self.silent_seconds > recovery.unresponsive_seconds:
            return f"it was silent for {self.silent_seconds:.1f} s{self._in_phase}"
        limit = recovery.stalled_seconds
        if self.phase == MEETING:
            limit = min(limit, MEETING_SECONDS)
        if self.stalled_seconds > limit:
            return f"it has not got on for {self.stalled_seconds:.1f} s{self._in_phase}"
        return ""

    @property
    def _in_phase(self) -> str:
        return f" in phase {self.phase!r} of its start" if self.phase else ""
