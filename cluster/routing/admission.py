"""Requests that wait for a place: how many may, and whose turn it is."""

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tandem.cluster.errors import Overloaded
from tandem.cluster.peers.table import Column, GatewayTable

LEAST_RETRY_SECONDS = 0.1
FIRST_GUESS_SECONDS = 1.0  # between two turns, before any was measured
SMOOTHING = 0.2
LOOK_SECONDS = 0.002  # between two looks at the other processes' rows
SILENT_NS = 500_000_000  # who has not looked for room for so long is not waited for


@dataclass(order=True)
class _Turn:
    """The lowest number goes first, and of equal ones the earliest."""

    number: int
    since: int  # monotonic nanoseconds
    given: "asyncio.Future[None]" = field(compare=False)


class RoomSignal:
    """Set when there may be room: something was given back, in any of the gateway's processes. As asyncio.Event."""

    def __init__(self, table: GatewayTable) -> None:
        self._table = table
        self._set = asyncio.Event()
        self._seen = 0

    def set(self) -> None:
        self._table.add(Column.GIVEN_BACK, 1)
        self._set.set()

    def clear(self) -> None:
        self._seen = self._table.total(Column.GIVEN_BACK)
        self._set.clear()

    async def wait(self) -> None:
        if self._table.processes == 1:
            await self._set.wait()
        while not self._set.is_set() and self._table.total(Column.GIVEN_BACK) == self._seen:
            await asyncio.sleep(LOOK_SECONDS)


class AdmissionQueue:
    """Clients take turns, each client's requests in order. A request keeps its turn until it has a place, unless a
    client comes that has had fewer turns.

    A request gets the number of a turn: one more than the last that found room, and one more for each request of its
    client that waits already, in whichever process. So a client has one turn a round, however many requests and
    processes it has.

    Bounded by requests and by the tokens they ask for; a request larger than the latter may wait alone. Owned by the
    gateway's event loop.
    """

    def __init__(self, max_requests: int, max_tokens: int, table: GatewayTable | None = None) -> None:
        """table: where the requests of all the gateway's processes are counted together; None: these only."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._table = table or GatewayTable.alone()
        self._waiting: list[_Turn] = []  # a heap
        self._head: _Turn | None = None
        self._turn_seconds = FIRST_GUESS_SECONDS
        self._passed_on = 0.0
        self.room = RoomSignal(self._table)

    @property
    def requests(self) -> int:
        """That wait in this process."""
        return self._table.own(Column.QUEUED)

    @property
    def tokens(self) -> int:
        """That they ask for."""
        return self._table.own(Column.QUEUED_TOKENS)

    @property
    def waits(self) -> bool:
        """Whether a request waits in any process."""
        return self._table.total(Column.QUEUED) > 0

    @asynccontextmanager
    async def turn(self, client: str, tokens: int, *, admitted: bool = False) -> AsyncGenerator[None]:
        """Waits for its turn, and has it inside the block. Overloaded when too much waits already, unless the request
        was admitted before."""
        self._count(1, tokens)  # before it looks, as all processes do: together they never admit too much
        try:
            if not admitted:
                self._check_room(tokens)
            column = self._table.client_column(client)
            number = self._table.highest(Column.TURNS_DONE) + 1 + self._table.total(column)
            self._table.add(column, 1)
            turn = _Turn(number, time.monotonic_ns(), asyncio.get_running_loop().create_future())
            try:
                await self._wait(turn)
                yield
                self._table.put(Column.TURNS_DONE, max(number, self._table.own(Column.TURNS_DONE)))
            finally:
                self._table.add(column, -1)
                if self._head is turn:
                    self._pass_on()
        finally:
            self._count(-1, -tokens)

    async def first(self) -> None:
        """For the request that has the turn: returns when none comes before it, in whichever process."""
        turn = self._head
        assert turn is not None, "the caller has the turn"
        while True:
            if self._waiting and self._waiting[0] < turn:
                turn.given = asyncio.get_running_loop().create_future()
                heapq.heappush(self._waiting, turn)
                self._pass_on()
                await turn.given
            elif not self._is_behind():
                return
            else:
                await asyncio.sleep(LOOK_SECONDS)

    def _is_behind(self) -> bool:
        table, head = self._table, self._head
        if table.processes == 1 or head is None:
            return False
        now = time.monotonic_ns()
        table.put(Column.TURN_LOOKED, now)
        for other in table.others():
            number = table.of(other, Column.TURN)
            if number and now - table.of(other, Column.TURN_LOOKED) < SILENT_NS:
                theirs = number, table.of(other, Column.TURN_SINCE), other
                if theirs < (head.number, head.since, table.process):
                    return True
        return False

    def _count(self, requests: int, tokens: int) -> None:
        self._table.add(Column.QUEUED_TOKENS, tokens)
        self._table.add(Column.QUEUED, requests)

    def _check_room(self, asked: int) -> None:
        requests = self._table.total(Column.QUEUED) - 1
        tokens = self._table.total(Column.QUEUED_TOKENS) - asked
        if requests >= self._max_requests:
            reason = f"{requests} requests are queued; gateway.max_queued is {self._max_requests}"
        elif requests and tokens + asked > self._max_tokens:
            reason = (
                f"{tokens} tokens are queued and the request asks for {asked}; "
                f"gateway.max_queued_tokens is {self._max_tokens}"
            )
        else:
            return
        # By then half of those that wait have had their turn, if turns go on as they did.
        seconds = (self.requests - 1) * self._turn_seconds / 2
        raise Overloaded(reason, retry_after_seconds=max(LEAST_RETRY_SECONDS, seconds))

    async def _wait(self, turn: _Turn) -> None:
        if self._head is None:
            self._passed_on = time.monotonic()
            self._begin(turn)
        else:
            heapq.heappush(self._waiting, turn)
            await turn.given

    def _pass_on(self) -> None:
        """The turn goes to the lowest number that still waits."""
        now = time.monotonic()
        self._turn_seconds += SMOOTHING * (now - self._passed_on - self._turn_seconds)
        self._passed_on = now
        while self._waiting:
            turn = heapq.heappop(self._waiting)
            if not turn.given.done():  # cancelled
                self._begin(turn)
                return
        self._head = None
        self._table.put(Column.TURN, 0)

    def _begin(self, turn: _Turn) -> None:
        self._head = turn
        table = self._table
        table.put(Column.TURN_LOOKED, time.monotonic_ns())
        table.put(Column.TURN_SINCE, turn.since)
        table.put(Column.TURN, turn.number)
        if not turn.given.done():
            turn.given.set_result(None)
