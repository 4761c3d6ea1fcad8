"""Whether processes live: their end is told at once, their silence is measured."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes import ActorProcess
from tandem.cluster.stop_signal import StopSignal

POLL_SECONDS = 0.25


class Heartbeat:
    """One question at a time to one process, whose silence counts from its first answer: starting takes its time.

    Only what this process has seen counts: when it was itself stopped for a while, nobody was silent meanwhile.
    """

    def __init__(self, process: ActorProcess) -> None:
        self.process = process
        self.silent_seconds = 0.0
        self._has_answered = False
        self._answer = process.call("ping")

    def tick(self, seconds: float) -> None:
        """seconds have passed since the last tick."""
        answered = self._answer.done()
        if answered and self._answer.exception() is None:
            self._has_answered = True
            self.silent_seconds = 0.0
        elif self._has_answered:
            self.silent_seconds += min(seconds, 2 * POLL_SECONDS)
        if answered:
            self._answer = self.process.call("ping")


class Liveness:
    """Watches the members of a group. A process that is stopped or slow counts as alive, up to the limit."""

    def __init__(self, members: Sequence[ActorProcess], unresponsive_seconds: float, stop: StopSignal) -> None:
        self._limit = unresponsive_seconds
        self._stop = stop
        self._ends: dict[Future[Any], ActorProcess] = {}
        self._heartbeats: list[Heartbeat] = []
        self._ticked = time.monotonic()
        self.add(members)

    def add(self, members: Iterable[ActorProcess]) -> None:
        for member in members:
            self._ends[member.call("wait")] = member
            self._heartbeats.append(Heartbeat(member))

    def forget(self, members: Sequence[ActorProcess]) -> None:
        """Their ends are no loss any more."""
        self._ends = {end: member for end, member in self._ends.items() if member not in members}
        self._heartbeats = [heartbeat for heartbeat in self._heartbeats if heartbeat.process not in members]

    def results(self, calls: Sequence[Future[Any]], seconds: float) -> list[Any]:
        """What the calls returned or the exception of the first that failed.

        ProcessEnded when a member has ended, or was ended here because it was silent for too long.
        """
        deadline = time.monotonic() + seconds
        pending = set(calls)
        while pending:
            done = self._wait(pending)
            for call in done:
                call.result()
            pending -= done
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:g} s")
        return [call.result() for call in calls]

    def _wait(self, calls: Iterable[Future[Any]]) -> set[Future[Any]]:
        """Those of `calls` that have ended, as soon as there is one, or none after a while."""
        done = self._stop.wait_any([*self._ends, *calls], POLL_SECONDS)
        for end in done & self._ends.keys():
            error = end.exception()
            raise error if isinstance(error, ProcessEnded) else ProcessEnded(self._ends[end].name, "it was stopped")
        now = time.monotonic()
        for heartbeat in self._heartbeats:
            heartbeat.tick(now - self._ticked)
            if heartbeat.silent_seconds > self._limit:
                heartbeat.process.kill()
                raise ProcessEnded(heartbeat.process.name, f"it was silent for {heartbeat.silent_seconds:.1f} s")
        self._ticked = now
        return done
