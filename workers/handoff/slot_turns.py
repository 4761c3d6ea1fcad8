"""Whose turn it is to get a slot for its LoRA adapter on this worker."""

import math
from dataclasses import dataclass

from tandem.workers.engine.engine import Engine
from tandem.workers.scheduling.ageing import level
from tandem.workers.wire.lease import Clock

PASSED_SECONDS = 2.0  # after which an adapter in use gives way to one that has waited as long
ASKED_SECONDS = 2.0  # a gateway asks again within this time for a request that waits


@dataclass
class _Wait:
    """An adapter that has no slot. priority: the lowest that asked. spare: slots that must stay free beside its own."""

    priority: int
    since: float
    asked: float
    spare: int


class SlotTurns:
    """Adapters that wait for a slot. Owned by the step thread.

    Requests without an adapter pass a request that waits for a slot, and so do those whose adapter is in a slot. Two
    rules bound the wait. A free slot goes to the first adapter that waits, by level and then by time. And once an
    adapter has waited for PASSED_SECONDS, the adapter that is in use for longest, and for as long, *gives way*: it gets
    no new requests of that level. Its requests end, and its slot is free. It gives way at once where requests of a
    lower level wait.

    Requests that have begun are never held back: a peer may wait for them. An adapter that nobody asks for any more is
    forgotten after ASKED_SECONDS, so there are at most as many as the worker holds.
    """

    def __init__(self, engine: Engine, clock: Clock, priority_seconds: float) -> None:
        """priority_seconds: see level()."""
        self._engine, self._clock, self._priority_seconds = engine, clock, priority_seconds
        self._waiting: dict[bytes, _Wait] = {}
        self._began: dict[
            bytes, float
        ] = {}  # of adapters in use: since when they are, where a request was not speculative

    def may_begin(self, digest: bytes, priority: int, spare: int = 0) -> bool:
        """Returns whether a new request may use the adapter, b"" for none, and leave `spare` slots unused. If not, the
        adapter waits from now on."""
        if not digest or self._finds(digest, priority, spare):
            return True
        gives_way = digest in self._engine.adapters_in_use and self._engine.has_slot(digest, spare)
        self.wait(digest, priority, 0 if gives_way else spare)
        return False

    def would_begin(self, digest: bytes, priority: int, spare: int = 0, *, freed: int) -> bool:
        """Returns whether the adapter would find a slot if this many more were unused. Changes nothing."""
        return not digest or self._finds(digest, priority, spare - freed)

    def may_resume(self, digest: bytes, own: int) -> bool:
        """Returns whether a parked request of this level finds a slot. If not, its adapter waits from now on."""
        if not digest:
            return True
        now = self._clock()
        before = 0 if digest in self._engine.adapters_in_use else sum(
            self._level(wait, now) < own for other, wait in self._needing(now) if other != digest
        )  # fmt: skip
        if self._engine.has_slot(digest, before):
            return True
        self.wait(digest, own)
        return False

    def wait(self, digest: bytes, priority: int, spare: int = 0) -> None:
        """Notes that a request has found no slot."""
        now = self._clock()
        known = self._waiting.get(digest)
        if known is None or now - known.asked > ASKED_SECONDS:
            self._waiting[digest] = _Wait(priority, now, now, spare)
        else:
            known.priority, known.asked, known.spare = min(known.priority, priority), now, spare

    def took(self, digest: bytes) -> None:
        """Notes that a request of the adapter has begun or resumed."""
        self._waiting.pop(digest, None)
        in_use = self._engine.adapters_in_use
        if in_use.get(digest) == 1:
            self._began = {one: since for one, since in self._began.items() if one in in_use}
            self._began[digest] = self._clock()

    def _finds(self, digest: bytes, priority: int, spare: int) -> bool:
        now = self._clock()
        own = self._waiting.get(digest)
        rank = (priority, now) if own is None else (min(self._level(own, now), priority), own.since)
        if digest in self._engine.adapters_in_use:
            return self._engine.has_slot(digest, spare) and digest not in self._giving_way(rank[0])
        before = [
            other
            for other, wait in self._needing(now)
            if other != digest and (self._level(wait, now), wait.since) < rank
        ]
        return self._engine.has_slot(digest, spare + len(before))

    def _giving_way(self, own: int) -> list[bytes]:
        """Returns the adapters in use that get no new requests of this level."""
        now, in_use = self._clock(), self._engine.adapters_in_use
        waiting = {digest: (self._level(wait, now), wait) for digest, wait in self._needing(now)}
        first = {
            digest: wait
            for digest, (other, wait) in waiting.items()
            if other < own or (other == own and now - wait.since > PASSED_SECONDS)
        }
        if not first:
            return []
        lacking = sum(one not in in_use for one in first) + max(wait.spare for wait in first.values())
        lacking -= self._engine.num_adapter_slots - len(in_use)
        giving = [one for one in in_use if one not in first][: max(lacking, 0)]
        if any(waiting[digest][0] < own for digest in first):
            return giving
        return [one for one in giving if now - self._began.get(one, -math.inf) > PASSED_SECONDS]

    def _needing(self, now: float) -> list[tuple[bytes, _Wait]]:
        """Returns the adapters that wait for a slot and that a request has asked for a moment ago."""
        for digest in [one for one, wait in self._waiting.items() if now - wait.asked > ASKED_SECONDS]:
            del self._waiting[digest]
        in_use = self._engine.adapters_in_use
        return [(one, wait) for one, wait in self._waiting.items() if one not in in_use or wait.spare]

    def _level(self, wait: _Wait, now: float) -> int:
        return level(wait.priority, now - wait.since, self._priority_seconds)
