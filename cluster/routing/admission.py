"""The queue of requests that wait for a place: its bounds, and the order of turns."""

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tandem.cluster.errors import Overloaded
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.workers.scheduling.ageing import level

LEAST_RETRY_SECONDS = 0.1
FIRST_GUESS_SECONDS = 1.0  # between two turns, before any was measured
SMOOTHING = 0.2
LOOK_SECONDS = 0.002  # between two looks at the other processes' rows
ASIDE_SECONDS = 0.1  # for which requests of a group that lacks room of its own let others pass
ASIDE_EACH_SECONDS = 0.005  # the same for each such group, so that many of them do not ask all the time
SILENT_NS = 500_000_000  # a process that has not looked for room for so long is not waited for


AskOthers = Callable[[int], Awaitable[bool]]


@dataclass(order=True)
class _Waiter:
    """A request in the queue. The lowest priority number goes first, and the earliest among equal ones."""

    number: int = field(init=False)
    since: int = field(init=False)  # monotonic nanoseconds
    client: int = field(compare=False)  # the column of its waiting requests in the table
    tokens: int = field(compare=False)
    requests: int = field(compare=False)  # as which it counts
    admitted: bool = field(compare=False)  # before: it never gives way
    priority: int = field(compare=False)
    group: bytes = field(compare=False)  # see AdmissionQueue
    given: "asyncio.Future[None]" = field(init=False, compare=False)
    counted: bool = field(default=False, compare=False)
    waits: bool = field(default=False, compare=False)  # and counts as one of its client
    gives_way: str = field(default="", compare=False)  # why it does


class RoomSignal:
    """An asyncio.Event that is set when there may be room: something was given back, in any of the gateway's
    processes."""

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
    """Requests with lower priority numbers go first. Within a priority clients take turns, each client's requests in
    order. A request keeps its turn until it has a place, unless a request with a lower number comes, or a client that
    has had fewer turns. A request that waits rises by one priority each priority_seconds, so that it does not wait for
    ever.

    A request with an adapter may lack a slot for it, or a worker that holds it. Others need neither. Requests that name
    one adapter are a *group*. While its first request lets others pass, the group is aside, for a moment.

    A request gets a turn number: one more than the last turn that found room, and one more for each waiting request of
    its client, in whichever process. So a client has one turn a round, however many requests and processes it has.

    Bounded by requests and by the tokens they ask for. A request that is larger than a bound may wait alone. At a
    bound, the client with most of the queue loses its newest request to a client that has less, the new request
    included, in whichever process either waits. Before that, the newest request of the last priority gives way to a
    request with a lower number that comes to the same process.

    Owned by the gateway's event loop.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        table: GatewayTable | None = None,
        ask_others: AskOthers | None = None,
        *,
        priority_seconds: float = 30.0,
    ) -> None:
        """table: where the requests of all the gateway's processes are counted together; None: only this process's.
        ask_others: PeerLinks.give_way."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._table = table or GatewayTable.alone()
        self._ask_others = ask_others
        self._waiting: dict[tuple[int, bytes], list[_Waiter]] = {}  # a heap for each priority and group
        self._aside: dict[bytes, float] = {}  # groups that are aside, and until when by time.monotonic()
        self._priority_seconds = priority_seconds
        self._head: _Waiter | None = None
        self._turn_seconds = FIRST_GUESS_SECONDS
        self._passed_on = 0.0
        self.room = RoomSignal(self._table)

    @property
    def requests(self) -> int:
        """The number of requests that wait in this process."""
        return self._table.own(Column.QUEUED)

    @property
    def tokens(self) -> int:
        """The number of tokens that the waiting requests of this process ask for."""
        return self._table.own(Column.QUEUED_TOKENS)

    @property
    def waits(self) -> bool:
        """True if a request waits in any process."""
        return self._table.total(Column.QUEUED) > 0

    @asynccontextmanager
    async def turn(
        self,
        client: str,
        tokens: int,
        *,
        requests: int = 1,
        admitted: bool = False,
        priority: int = 0,
        group: bytes = b"",
    ) -> AsyncGenerator[None]:
        """Waits for the request's turn, and holds it inside the block. Overloaded when too much waits already, or when
        the request gives way, unless it was admitted before. requests: how many requests it counts as. group: the
        digest of its adapter; empty for a request without."""
        owner = f"{client}\0{priority}" if priority else client  # each priority has turns of its own
        turn = _Waiter(self._table.client_column(owner), tokens, requests, admitted, priority, group)
        self._count(turn)  # before it looks, as all processes do: together they never admit too much
        try:
            if not admitted:
                await self._find_room(turn)
            self._join(turn)
            await self._wait(turn)
            yield
            self._aside.pop(group, None)  # what its group lacked is there
            self._table.put(Column.TURNS_DONE, max(turn.number, self._table.own(Column.TURNS_DONE)))
        finally:
            self._leave(turn)
            if self._head is turn:
                self._pass_on()

    def give_way(self, client: int) -> bool:
        """Ends the newest request of the last priority that waits here for a client, by its column in the table.
        Returns whether there was one."""
        asked = [turn for heap in self._waiting.values() for turn in heap if turn.client == client]
        return self._end_newest(asked, "this client has most of it: its newest request gives way to another client's")

    async def first(self) -> None:
        """Returns once no request of any process comes before the caller's, which has the turn."""
        turn = self._head
        assert turn is not None, "the caller has the turn"
        while True:
            other = self._next()
            now = time.monotonic_ns()
            if other is not None and self._goes_before(other, turn, now):
                self._push(turn)
                self._begin_next()
                await self._given(turn)
            elif not self._is_behind():
                return
            else:
                await asyncio.sleep(LOOK_SECONDS)

    def let_pass(self) -> bool:
        """For the request that has the turn and lacks what its group alone needs: requests of other groups pass those
        of its group for a moment. True if one waits now: the caller calls first() at once."""
        turn = self._head
        assert turn is not None, "the caller has the turn"
        now = time.monotonic()
        self._aside = {group: until for group, until in self._aside.items() if until > now}
        self._aside[turn.group] = now + max(ASIDE_SECONDS, ASIDE_EACH_SECONDS * len(self._aside))
        self._table.put(Column.TURN, 0)  # other processes do not wait for it
        other = self._next()
        return other is not None and not self._is_aside(other)

    def _goes_before(self, other: _Waiter, head: _Waiter, now: int) -> bool:
        if self._is_aside(other):
            return False
        return self._is_aside(head) or self._rank(other, now) < self._rank(head, now)

    def _is_aside(self, turn: _Waiter) -> bool:
        return self._aside.get(turn.group, 0.0) > time.monotonic()

    def _is_behind(self) -> bool:
        table, head = self._table, self._head
        if table.processes == 1 or head is None:
            return False
        now = time.monotonic_ns()
        table.put(Column.TURN_LOOKED, now)
        table.put(Column.TURN, head.number)  # let_pass() may have taken it back
        for other in table.others():
            number = table.of(other, Column.TURN)
            if number and now - table.of(other, Column.TURN_LOOKED) < SILENT_NS:
                since = table.of(other, Column.TURN_SINCE)
                theirs = self._level(table.of(other, Column.TURN_PRIORITY), since, now), number, since, other
                if theirs < (self._level(head.priority, head.since, now), head.number, head.since, table.process):
                    return True
        return False

    def _count(self, turn: _Waiter) -> None:
        turn.counted = True
        self._table.add(Column.QUEUED_TOKENS, turn.tokens)
        self._table.add(Column.QUEUED, turn.requests)

    def _join(self, turn: _Waiter) -> None:
        """Counts the request as one of its client from now on."""
        table, turn.waits = self._table, True
        turn.number = table.highest(Column.TURNS_DONE) + 1 + table.total(turn.client)
        turn.since = time.monotonic_ns()
        table.add(turn.client, turn.requests)
        table.add(table.tokens_column(turn.client), turn.tokens)

    def _leave(self, turn: _Waiter) -> None:
        """Counts nothing of the request any more. Idempotent."""
        table = self._table
        if turn.waits:
            turn.waits = False
            table.add(turn.client, -turn.requests)
            table.add(table.tokens_column(turn.client), -turn.tokens)
        if turn.counted:
            turn.counted = False
            table.add(Column.QUEUED_TOKENS, -turn.tokens)
            table.add(Column.QUEUED, -turn.requests)

    async def _find_room(self, turn: _Waiter) -> None:
        """Returns when the queue has room for the request, which another client may have to make. Otherwise raises
        Overloaded."""
        while reason := self._is_full(turn):
            heaps = self._waiting.items()
            below = [waits for (priority, _), heap in heaps if priority > turn.priority for waits in heap]
            if self._end_newest(below, "one of a lower priority has come, to which the newest request gives way"):
                continue
            by_tokens = "max_queued_tokens" in reason
            client, most = self._table.largest_client(by_tokens=by_tokens)
            column = self._table.tokens_column(turn.client) if by_tokens else turn.client
            least = most <= self._table.total(column) + (turn.tokens if by_tokens else turn.requests)
            if least or not (self.give_way(client) or (self._ask_others and await self._ask_others(client))):
                raise self._overloaded(reason)

    def _is_full(self, turn: _Waiter) -> str:
        """Names the bound that keeps the request out; empty if it may come in."""
        requests = self._table.total(Column.QUEUED) - turn.requests
        tokens = self._table.total(Column.QUEUED_TOKENS) - turn.tokens
        if requests >= self._max_requests:
            return f"{requests} requests are queued; gateway.max_queued is {self._max_requests}"
        if requests and requests + turn.requests > self._max_requests:
            return (
                f"{requests} requests are queued and the request counts as {turn.requests}; "
                f"gateway.max_queued is {self._max_requests}"
            )
        if requests and tokens + turn.tokens > self._max_tokens:
            return (
                f"{tokens} tokens are queued and the request asks for {turn.tokens}; "
                f"gateway.max_queued_tokens is {self._max_tokens}"
            )
        return ""

    def _overloaded(self, reason: str) -> Overloaded:
        # By then half of the waiting requests have had their turn, at the present pace.
        seconds = (self.requests - 1) * self._turn_seconds / 2
        return Overloaded(reason, retry_after_seconds=max(LEAST_RETRY_SECONDS, seconds))

    async def _wait(self, turn: _Waiter) -> None:
        if self._head is None:
            turn.given = asyncio.get_running_loop().create_future()
            self._passed_on = time.monotonic()
            self._begin(turn)
        else:
            self._push(turn)
            if turn.priority < self._head.priority or (self._is_aside(self._head) and not self._is_aside(turn)):
                self.room.set()  # the head hands its turn over
            await self._given(turn)

    async def _given(self, turn: _Waiter) -> None:
        await turn.given
        if turn.gives_way:
            raise self._overloaded(
                f"the queue is full and {turn.gives_way} (gateway.max_queued is {self._max_requests}, "
                f"gateway.max_queued_tokens is {self._max_tokens})"
            )

    def _push(self, turn: _Waiter) -> None:
        turn.given = asyncio.get_running_loop().create_future()
        heap = self._waiting.setdefault((turn.priority, turn.group), [])
        if len(heap) > 2 * self.requests:  # half of them have left
            heap[:] = [one for one in heap if not one.given.done()]
            heapq.heapify(heap)
        heapq.heappush(heap, turn)

    def _pass_on(self) -> None:
        """Ends a turn. One that is handed over goes on later, so it does not count here."""
        now = time.monotonic()
        self._turn_seconds += SMOOTHING * (now - self._passed_on - self._turn_seconds)
        self._passed_on = now
        self._begin_next()

    def _begin_next(self) -> None:
        """Gives the turn to the first request that still waits."""
        turn = self._next()
        if turn is not None:
            heapq.heappop(self._waiting[turn.priority, turn.group])
            self._begin(turn)
            return
        self._head = None
        self._table.put(Column.TURN, 0)

    def _next(self) -> _Waiter | None:
        """Returns the first request that still waits. One whose group is aside comes after all others."""
        for key, heap in list(self._waiting.items()):
            while heap and heap[0].given.done():  # cancelled
                heapq.heappop(heap)
            if not heap:
                del self._waiting[key]
        now, firsts = time.monotonic_ns(), (heap[0] for heap in self._waiting.values())
        return min(firsts, key=lambda turn: (self._is_aside(turn), self._rank(turn, now)), default=None)

    def _end_newest(self, turns: Iterable[_Waiter], reason: str) -> bool:
        """Ends the newest waiting request of the last priority here. Returns whether one could be ended."""
        asked = [turn for turn in turns if not turn.admitted and not turn.given.done()]
        if not asked:
            return False
        newest = max(asked, key=lambda turn: (turn.priority, turn.since))
        self._leave(newest)
        newest.gives_way = reason
        newest.given.set_result(None)
        return True

    def _rank(self, turn: _Waiter, now: int) -> tuple[int, int, int]:
        """Returns the key of the order of turns: the lowest goes first."""
        return self._level(turn.priority, turn.since, now), turn.number, turn.since

    def _level(self, priority: int, since: int, now: int) -> int:
        return level(priority, (now - since) / 1e9, self._priority_seconds)

    def _begin(self, turn: _Waiter) -> None:
        self._head = turn
        table = self._table
        table.put(Column.TURN_LOOKED, time.monotonic_ns())
        table.put(Column.TURN_SINCE, turn.since)
        table.put(Column.TURN_PRIORITY, turn.priority)
        table.put(Column.TURN, turn.number)
        if not turn.given.done():
            turn.given.set_result(None)
