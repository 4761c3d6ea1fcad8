"""Overcommit: requests reserve pages for only a part of their output, and take more as they grow."""

from collections.abc import Callable

import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import OutOfPages
from tandem.workers.decode.yielded_rows import YieldedRows
from tandem.workers.engine.engine import Engine
from tandem.workers.handoff.reservations import Reservations
from tandem.workers.requests.decode_request import DecodeRequest
from tandem.workers.scheduling.decode_rows import DecodeRows

GROWTH_PAGES = 4  # pages that a request takes at a time

Leave = Callable[[list[DecodeRequest]], None]


class Overcommit:
    """Gives each row, before each launch, the pages for that step and all steps in flight. Owned by the step thread.

    A row pauses if no pages are free. Then rows that rank after it are parked: the highest level first, and within a
    level the latest. If parking all these rows would not be enough, the row itself is parked. So the first-ranked row
    never waits for a running one, and even a request as long as the pool can always finish.
    """

    def __init__(
        self, engine: Engine, rows: DecodeRows, reservations: Reservations, leave: Leave, yielded: YieldedRows
    ) -> None:
        """leave: parks rows once no step in flight has them."""
        self._engine, self._rows, self._reservations, self._leave = engine, rows, reservations, leave
        self._yielded = yielded
        self._page_size = engine.layout.page_size
        self._of: list[DecodeRequest] | None = None  # the rows that the limits below belong to
        self._limits = self._full = np.zeros(0, np.int64)
        self._paused: list[DecodeRequest] = []

    def __len__(self) -> int:
        """The number of paused rows."""
        return len(self._paused)

    @property
    def paused(self) -> list[DecodeRequest]:
        return self._paused

    def settle(self, is_stepped: Callable[[DecodeRequest], bool], *, comes: bool) -> list[DecodeRequest]:
        """Returns paused rows that now have their pages, and parks those that cannot get any. comes: whether others are
        still leaving, which frees pages."""
        found: list[DecodeRequest] = []
        for request in sorted((one for one in self._paused if not is_stepped(one)), key=rank):
            if self._grows(request, request.length):
                found.append(request)
            elif comes:
                continue
            else:
                self._leave([request])
            self._paused.remove(request)
        return found

    def grow(self, may_leave: Callable[[DecodeRequest], bool]) -> None:
        """Gives rows the pages for the next launch. may_leave: see Parking."""
        rows = self._rows
        short = np.flatnonzero(self._needed() > self._limits)
        if not short.size:
            return
        self._of = None
        lengths = dict(zip(rows.requests, rows.lengths.tolist(), strict=True))
        for request in sorted((rows.requests[index] for index in short.tolist()), key=rank):
            if request in rows.requests and not self._grows(request, lengths[request]):
                self._pause(request, lengths[request], may_leave)

    def forget(self, request: DecodeRequest) -> None:
        """Forgets a request that ends. Idempotent."""
        if request in self._paused:
            self._paused.remove(request)

    def _pause(self, request: DecodeRequest, length: int, may_leave: Callable[[DecodeRequest], bool]) -> None:
        lacking = self._lacking(request, length)
        others = (*self._rows.requests, *self._yielded.requests)
        after = sorted((one for one in others if rank(one) > rank(request) and may_leave(one)), key=rank)
        leaving: list[DecodeRequest] = []
        while after and max(lacking) > 0:
            leaving.append(after.pop())
            held = self._engine.held(leaving[-1].sequence_id)
            lacking = [lack - pages for lack, pages in zip(lacking, held, strict=True)]
        if max(lacking) > 0:
            self._leave([request])
            return
        self._rows.leave([request])
        self._paused.append(request)
        self._leave(leaving)

    def _grows(self, request: DecodeRequest, length: int) -> bool:
        """Takes the next pages for a request of `length` positions. False if there are not enough."""
        if max(self._lacking(request, length)) > 0:
            return False
        capacity, longest = self._wanted(request, length)
        try:
            self._engine.narrow(request.sequence_id, capacity, longest)
        except OutOfPages:  # it must copy pages that it shares
            return False
        request.reserved = capacity
        return True

    def _wanted(self, request: DecodeRequest, length: int) -> tuple[int, int]:
        capacity, longest = self._reservations.room.reach(request.prompt, request.max_tokens)
        return min(capacity, length + self._reservations.room.margin + GROWTH_PAGES * self._page_size), longest

    def _lacking(self, request: DecodeRequest, length: int) -> list[int]:
        """Returns how many pages of each layer group are missing; negative: some would be left."""
        room = self._engine.room(*self._wanted(request, length), request.prompt.encoder.length)
        held = self._engine.held(request.sequence_id)
        return [need - own - free for need, own, free in zip(room.needed, held, room.free, strict=True)]

    def _needed(self) -> Int64Array:
        """int64 [n]: the position up to which steps may write each row before the next check."""
        if self._rows.requests is not self._of:
            self._of, requests = self._rows.requests, self._rows.requests
            self._limits = np.array([one.reserved for one in requests], np.int64)
            reached = [self._reservations.room.reach(one.prompt, one.max_tokens)[0] for one in requests]
            self._full = np.array(reached, np.int64)
        return np.minimum(self._rows.lengths + self._reservations.room.margin, self._full)


def rank(request: DecodeRequest) -> tuple[int, int]:
    """Returns a request's place in the order. The last one leaves first."""
    return request.level, request.sequence_id
