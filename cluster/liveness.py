"""Whether processes live: their end is told at once; their silence, and how long they have not got on, is measured."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from tandem.cluster.config import RecoverySection
from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes import ActorProcess
from tandem.cluster.stop_signal import StopSignal

POLL_SECONDS = 0.25


class Heartbeat:
    """One question at a time to one process: ping(). It answers None, or, while it prepares something, a number that
    changes when it has got on with that.

    Only what this process has seen counts: when it was itself stopped for a while, nobody was silent meanwhile.
    silent_seconds: without an answer, since the process was there or had answered. stalled_seconds: how long it has
    prepared something and not got on; until it is there, its imports are that.
    """

    def __init__(self, process: ActorProcess) -> None:
        self.process = process
        self.silent_seconds = 0.0
        self.stalled_seconds = 0.0
        self._there = process.there()
        self._answer = process.call("ping")
        self._got_to: int | None = None

    def tick(self, seconds: float) -> None:
        """seconds have passed since the last tick."""
        seconds = min(seconds, 2 * POLL_SECONDS)
        if not self._there.done():
            self.stalled_seconds += seconds
            return
        answered = self._answer.done()
        if answered and self._answer.exception() is None:
            got_to = self._answer.result()
            gets_on = got_to is None or got_to != self._got_to
            self.stalled_seconds = 0.0 if gets_on else self.stalled_seconds + seconds
            self.silent_seconds, self._got_to = 0.0, got_to
        else:
            self.silent_seconds += seconds
        if answered:
            self._answer = self.process.call("ping")


class Liveness:
    """Watches the members of a group. A process that is stopped or slow counts as alive, up to the limits."""

    def __init__(self, members: Sequence[ActorProcess], recovery: RecoverySection, stop: StopSignal) -> None:
        self._recovery = recovery
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

        ProcessEnded when a member has ended, or was ended here because it was silent or did not get on for too long.
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
            if heartbeat.silent_seconds > self._recovery.unresponsive_seconds:
                self._give_up(heartbeat, f"it was silent for {heartbeat.silent_seconds:.1f} s")
            if heartbeat.stalled_seconds > self._recovery.stalled_seconds:
                self._give_up(heartbeat, f"its start has not got on for {heartbeat.stalled_seconds:.1f} s")
        self._ticked = now
        return done

    @staticmethod
    def _give_up(heartbeat: Heartbeat, why: str) -> NoReturn:
        heartbeat.process.kill()
        raise ProcessEnded(heartbeat.process.name, why)
