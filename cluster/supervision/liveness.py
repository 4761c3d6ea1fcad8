"""A watch over a group of processes: it sees an end at once and measures silence."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from tandem.cluster.config.sections import RecoverySection
from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes.processes import ActorProcess
from tandem.cluster.supervision.heartbeat import POLL_SECONDS, Heartbeat
from tandem.cluster.supervision.stop_signal import StopSignal


class Liveness:
    """A watch over a group's members. A process that is stopped or slow counts as alive, up to the limits."""

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
        """Stops watching the members: from now on they may end."""
        self._ends = {end: member for end, member in self._ends.items() if member not in members}
        self._heartbeats = [heartbeat for heartbeat in self._heartbeats if heartbeat.process not in members]

    def results(self, calls: Sequence[Future[Any]], seconds: float) -> list[Any]:
        """The results of the calls, or the exception of the first that fails.

        ProcessEnded when a member has ended, or is ended here after its limit of silence or without progress.
        TimeoutError after `seconds` without a result and without any member's progress.
        """
        deadline, got_to = time.monotonic() + seconds, self._got_to()
        pending = set(calls)
        while pending:
            done = self.wait(pending)
            if done or got_to != self._got_to():
                deadline, got_to = time.monotonic() + seconds, self._got_to()
            for call in done:
                call.result()
            pending -= done
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {seconds:g} s{self._phases()}")
        return [call.result() for call in calls]

    def outlast(self, calls: Iterable[Future[Any]], seconds: float) -> None:
        """Returns once all calls have ended, in whatever way, or after so many seconds. The next wait raises a loss of
        the meantime."""
        pending, lost, deadline = set(calls), list[ActorProcess](), time.monotonic() + seconds
        while pending and time.monotonic() < deadline:
            try:
                pending -= self.wait(pending)
            except ProcessEnded as error:
                gone = [member for member in self._ends.values() if member.name == error.name]
                if not gone:
                    raise
                self.forget(gone)
                lost += gone
        self.add(lost)

    def wait(self, calls: Iterable[Future[Any]]) -> set[Future[Any]]:
        """Returns the ended ones of `calls`, as soon as there is one, or none after POLL_SECONDS. Raises the errors of
        results()."""
        done = self._stop.wait_any([*self._ends, *calls], POLL_SECONDS)
        for end in done & self._ends.keys():
            error = end.exception()
            reason = str(error) if error else "it was stopped"
            raise error if isinstance(error, ProcessEnded) else ProcessEnded(self._ends[end].name, reason)
        now = time.monotonic()
        for heartbeat in self._heartbeats:
            heartbeat.tick(now - self._ticked)
            heartbeat.warn()
            if why := heartbeat.excess(self._recovery):
                heartbeat.process.kill()
                raise ProcessEnded(heartbeat.process.name, why)
        self._ticked = now
        return done

    def _got_to(self) -> list[tuple[str, int] | None]:
        return [heartbeat.got_to for heartbeat in self._heartbeats]

    def _phases(self) -> str:
        """Lists the members that still start, with their phases."""
        preparing = [heartbeat for heartbeat in self._heartbeats if heartbeat.phase]
        return "".join(f"; {heartbeat.process.name} is in phase {heartbeat.phase!r}" for heartbeat in preparing)
