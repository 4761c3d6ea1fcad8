"""Preemption: running requests give up their pages to more urgent ones, and continue later.

    leave          read by all steps         copied          resume          copied
row ─────► leaving ─────────────────► copying ─────► parked ───────► rising ───────► row
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from tandem.cache.plan.errors import OutOfPages, OutOfSequences
from tandem.workers.config import LoopSettings
from tandem.workers.counters import Counters
from tandem.workers.decode.overcommit import Overcommit, rank
from tandem.workers.decode.steps_in_flight import StepsInFlight
from tandem.workers.decode.yielded_rows import YieldedRows
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import NoRoom
from tandem.workers.handoff.reservations import Ask, Reservations
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.scheduling.ageing import level
from tandem.workers.scheduling.scheduler import Scheduler
from tandem.workers.wire.lease import Clock
from tandem.workers.wire.reservation import Reservation

ASKED_SECONDS = 0.25  # a gateway asks again within this time for a request that found no room
POLL_SECONDS = 0.02  # between looks for room while a request is parked
COPY_POLL_SECONDS = 0.001  # between looks while a request is copied
MOST_BYTES = 1 << 30  # being copied; beyond that no other request begins to be copied
REPLACED_PART = 4  # at most a quarter of a worker's sequences may be replaced and not copied yet
FIRST = -(1 << 40)  # the level of a request that has been parked for too long


class Ends(Protocol):
    def abort(self, request_id: str, writer_quiet: bool) -> bool:
        """See Decodes."""
        ...


IsPast = Callable[[], bool]


@dataclass(eq=False)
class _Want:
    """A request that found no room. done: set once all requests that make room for it are parked."""

    ask: Ask
    done: "Future[None]" = field(default_factory=Future)


class Parking:
    """Decides which of the requests that have begun run now. Owned by the step thread.

    A request without room parks running requests with higher priority numbers, if that makes enough room: the highest
    number first, and among equal ones the latest arrival. Parked requests resume in the order of their levels (see
    ageing) as soon as there is room. A new request waits behind parked ones of its own or a lower level. A request
    keeps the level at which it resumed, so the requests that it waited for cannot park it again. One that has been
    parked for too long goes before all that wait for room, also before prompts for peers.

    A request that lacks nothing but a sequence does not wait until others are copied: it replaces them at once. Rows
    pause while its prompt is computed, see YieldedRows.

    Steps of other rows run while a request is copied. Its pages are freed, and it gets a row again, once its copies are
    done on all ranks.

    With overcommitted rows (see Overcommit), rows also leave for each other. Such a row is dropped if host memory has
    no room for it.

    Requests keep their tokens, which is all that guides, penalties and n-gram drafts need. A request is not parked if
    it slides, if a model or a head drafts for it, or before its prompt is computed.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        reservations: Reservations,
        steps: StepsInFlight,
        counters: Counters,
        settings: LoopSettings,
        clock: Clock,
        decodes: Ends,
    ) -> None:
        """decodes: ends a dropped request, which the gateway then places again."""
        self._engine, self._scheduler, self._reservations, self._steps = engine, scheduler, reservations, steps
        self._rows = rows = scheduler.rows
        self._counters = counters
        self._most, self._seconds = settings.parking.most, settings.parking.seconds
        self._priority_seconds, self._max_sequences = settings.priority_seconds, settings.max_sequences
        self._clock = clock
        self._leaving: list[DecodeRequest] = []
        self._copying: list[tuple[IsPast | None, DecodeRequest]] = []
        self._rising: list[tuple[IsPast | None, DecodeRequest]] = []
        self._parked: dict[DecodeRequest, float] = {}  # and the time at which each was parked
        self._slotless: set[DecodeRequest] = set()  # parked requests that had no slot when they were last looked at
        self._want: _Want | None = None
        self._decodes = decodes
        overcommits = settings.parking.reserved_output < 1
        self.yielded = YieldedRows(rows, clock)
        self._growth = Overcommit(engine, rows, reservations, self._leave, self.yielded) if overcommits else None
        self._refused = (0, -ASKED_SECONDS)  # priority of the last request that found no room, and when it asked
        self._granted = True  # whether a request of that priority has found room since

    def __len__(self) -> int:
        """The number of requests that have begun but have no row."""
        paused = 0 if self._growth is None else len(self._growth)
        return len(self._leaving) + len(self._copying) + len(self._parked) + len(self._rising) + paused

    # Requests that ask for room

    def reserve(self, ask: Ask, prepare: Callable[[], Reservation], *, known: bool, parks: bool) -> Reservation:
        """Returns the reservation of a request. Raises NoRoom if other requests go first, or if prepare() raises it
        and no rows are replaced. Then `coming` ends once requests have left to make room. prepare: see
        Reservations.prepare. known: whether it already has a reservation. parks: whether it may park others."""
        if self._most and not known:
            self._check(ask.prompt.priority)
        while True:
            try:
                made = prepare()
                break
            except NoRoom as error:
                if not self._most:
                    raise
                leavers = self._leavers(ask)
                if not parks or not self._replaces(ask, leavers):
                    error.coming = self._refused_one(ask, leavers if parks else [], lacks_slot=error.lacks_slot)
                    error.would_park = not parks and bool(leavers)
                    raise
        self._granted = self._granted or ask.prompt.priority <= self._refused[0]
        return made

    def _check(self, priority: int) -> None:
        waiting = [one for one in self._waiting if one not in self._slotless]
        first = min(map(self._level, waiting), default=priority + 1)
        if first <= priority:
            raise NoRoom(f"parked requests of priority {first} resume before one of priority {priority} begins")
        if not self._granted and self._is_asked_for(priority):
            raise NoRoom(f"a request of priority {self._refused[0]} gets room before one of priority {priority}")

    def _leavers(self, ask: Ask) -> list[DecodeRequest]:
        """Returns the requests that may leave now to make room for `ask`; none while others leave for one that goes
        before it."""
        others = self._want is not None and self._want.ask.prompt.priority <= ask.prompt.priority
        return [] if others else self._chosen(ask)

    def _replaces(self, ask: Ask, leavers: list[DecodeRequest]) -> bool:
        """Lets the leavers go if `ask` lacks only a sequence, and returns whether it does. They are copied while its
        prompt is computed."""
        if not leavers or max(self._reservations.shortage(ask)[0]) > 0 or self._reservations.needs_slot(ask):
            return False
        under_way = len(self._leaving) + len(self._copying)
        if under_way + len(leavers) > max(self._max_sequences // REPLACED_PART, 1):
            return False
        for request in leavers:
            request.replaced = True
        self._leave(leavers)
        return True

    def _refused_one(self, ask: Ask, leavers: list[DecodeRequest], *, lacks_slot: bool) -> "Future[None] | None":
        """Notes that a request found no room, and lets the leavers go. The future ends when they have left; None
        without leavers. A request that lacks only a slot holds nobody up."""
        priority = ask.prompt.priority
        if not lacks_slot and not self._is_asked_for(priority):
            self._note(priority)
        if not leavers:
            return None
        if self._want is not None:
            self._end_want()
        self._leave(leavers)
        self._want = _Want(ask)
        return self._want.done

    # Steps

    def upkeep(self) -> list[DecodeRequest]:
        """Called before each batch. Returns the requests whose pages are back, which get a row."""
        self._copy()
        if not self._engine.capabilities.drafts:  # a drafter goes on from the step before
            self._rows.join(self.yielded.update(self._scheduler.urgent_priority))
        if self._growth is not None:
            comes = bool(self._leaving or self._copying)
            self._rows.join(self._growth.settle(self._is_stepped, comes=comes))
            self._growth.grow(self._may_leave)
        if self._want is not None and not self._leaving and not self._copying:
            self._end_want()
        self._slotless.clear()
        if self._parked:
            self._resume()
        self._scheduler.keeps_room = self._keeps_room
        return self._risen() if self._rising else []

    @property
    def again(self) -> float | None:
        """Returns the seconds until upkeep() must be called again; None: no need."""
        if self._copying or self._rising or self.yielded:
            return COPY_POLL_SECONDS
        return POLL_SECONDS if len(self) else None

    @property
    def rising(self) -> list[DecodeRequest]:
        """The requests that have resumed, while their pages are copied back."""
        return [request for _, request in self._rising]

    def withdraw(self, request: DecodeRequest) -> bool:
        """Forgets a request that ends. True if the cache no longer has its sequence."""
        if request in self._leaving:
            self._leaving.remove(request)
        self.yielded.forget(request)
        if self._growth is not None:
            self._growth.forget(request)
        self._rising = [one for one in self._rising if one[1] is not request]
        if not request.parked:
            return False
        request.parked = False
        self._engine.forget(request.sequence_id)
        self._copying = [one for one in self._copying if one[1] is not request]
        return self._parked.pop(request, None) is not None

    def _copy(self) -> None:
        """Starts to copy requests that no step in flight has, and frees the pages of requests that are copied."""
        engine, leaving = self._engine, self._leaving
        self._leaving = [request for request in leaving if self._is_stepped(request)]
        for request in leaving:
            if request in self._leaving:
                continue
            if engine.bytes_in_copies > MOST_BYTES:
                self._leaving.append(request)
            elif engine.can_park(request.sequence_id) and len(self._parked) + len(self._copying) < self._most:
                engine.park(request.sequence_id)
                request.parked, request.replaced = True, False
                self._counters.parks += 1
                self._copying.append((engine.mark(copies=True), request))
            elif self._growth is None:  # host memory is full
                if request.replaced and not self._reservations.has_sequence:
                    self._leaving.append(request)
                else:
                    request.replaced = False
                    self._rows.join([request])
            else:
                self._decodes.abort(request.request_id, writer_quiet=True)
        copying, self._copying = self._copying, []
        for is_past, request in copying:
            if is_past is None or is_past():
                engine.free(request.sequence_id)
                self._parked[request] = self._clock()
            else:
                self._copying.append((is_past, request))

    def _resume(self) -> None:
        """Starts to copy parked requests back, as far as there is room for them. Others pass a request that has no slot
        for its adapter."""
        slots = self._reservations.slots
        for request in sorted(self._parked, key=lambda one: (self._level(one), one.sequence_id)):
            own, adapter = self._level(request), request.prompt.adapter
            if self._is_asked_for(own):
                break
            if not slots.may_resume(adapter, own):
                self._slotless.add(request)
                continue
            if not self._reservations.has_room(request):
                break
            if self._engine.bytes_in_copies > MOST_BYTES:
                break
            reach = self._reservations.room.first_reach(request.prompt, request.max_tokens, len(request.output))
            try:
                self._engine.resume(request.sequence_id, *reach)
            except (OutOfPages, OutOfSequences):
                break
            del self._parked[request]
            slots.took(adapter)
            request.parked, request.level, request.reserved = False, own, reach[0]
            self._counters.resumes += 1
            self._rising.append((self._engine.mark(copies=True), request))

    def _risen(self) -> list[DecodeRequest]:
        rising, risen = self._rising, []
        self._rising = []
        for is_past, request in rising:
            if is_past is None or is_past():
                risen.append(request)
            else:
                self._rising.append((is_past, request))
        return risen

    def _is_stepped(self, request: DecodeRequest) -> bool:
        """Returns whether the request is in a step whose results are not read yet."""
        return any(step is not None and request in step.requests for step in (self._steps.behind, self._steps.reading))

    def _leave(self, requests: Sequence[DecodeRequest]) -> None:
        self._rows.leave(requests)
        self.yielded.forget(*requests)
        self._leaving += requests

    def _chosen(self, ask: Ask) -> list[DecodeRequest]:
        """The requests that must leave to make room for `ask`; empty if even all of them would not be enough."""
        short, rows = self._reservations.shortage(ask)
        running = [*self._rows.requests, *self.yielded.requests]
        candidates = [one for one in running if one.level > ask.prompt.priority and self._may_leave(one)]
        candidates.sort(key=rank, reverse=True)
        first = self._slot_makers(ask, candidates)
        if first is None:
            return []
        chosen: list[DecodeRequest] = []
        candidates = [*first, *(one for one in candidates if one not in first)]
        for request in candidates[: max(self._most - len(self), 0)]:
            if rows <= 0 and max(short) <= 0 and len(chosen) >= len(first):
                break
            chosen.append(request)
            rows -= 1
            short = [lack - held for lack, held in zip(short, self._engine.held(request.sequence_id), strict=True)]
        return chosen if rows <= 0 and max(short) <= 0 and len(chosen) >= len(first) else []

    def _slot_makers(self, ask: Ask, candidates: list[DecodeRequest]) -> list[DecodeRequest] | None:
        """The candidates, sorted by rank, that must leave to free a slot for the adapter of `ask`: all users of one
        adapter. Empty if it has a slot; None if nobody can free one."""
        if not self._reservations.needs_slot(ask):
            return []
        users: dict[bytes, list[DecodeRequest]] = {}
        for request in candidates:
            users.setdefault(request.prompt.adapter, []).append(request)
        in_use = self._engine.adapters_in_use
        whole = [rows for adapter, rows in users.items() if len(rows) == in_use.get(adapter)]
        if not whole or self._reservations.needs_slot(ask, freed=1):
            return None
        return max(whole, key=lambda rows: rank(rows[-1]))  # whose first-ranked row ranks last

    def _may_leave(self, request: DecodeRequest) -> bool:
        if request.ended or request.prompt.sliding is not None or self._engine.capabilities.drafts:
            return False
        return self._engine.can_park(request.sequence_id)

    def _end_want(self) -> None:
        want, self._want = self._want, None
        if want is not None:
            self._note(want.ask.prompt.priority)  # the requests that left for it must not resume before it
            want.done.set_result(None)

    def _note(self, priority: int) -> None:
        """Notes that a request of this priority finds no room now."""
        self._refused, self._granted = (priority, self._clock()), False

    def _is_asked_for(self, own: int) -> bool:
        """Returns whether a request with a lower number found no room a moment ago, or others leave for one."""
        priority, when = self._refused
        if self._want is not None and self._want.ask.prompt.priority < own:
            return True
        return priority < own and self._clock() - when < ASKED_SECONDS

    @property
    def _keeps_room(self) -> bool:
        """Whether waiting prompts get no room, because a request has been parked for too long. Not while this worker
        awaits KV from peers: their prompts may wait for prompts of this worker."""
        late = (self._level(one) <= FIRST for one in self._parked if one not in self._slotless)
        return any(late) and not self._reservations.awaits_peers

    @property
    def _waiting(self) -> list[DecodeRequest]:
        paused = () if self._growth is None else self._growth.paused
        return [*self._leaving, *(request for _, request in self._copying), *self._parked, *paused]

    def _level(self, request: DecodeRequest) -> int:
        waited = self._clock() - self._parked.get(request, self._clock())
        return FIRST if waited > self._seconds else level(request.level, waited, self._priority_seconds)
