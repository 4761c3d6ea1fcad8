"""Requests that wait for a place: how many may, and whose turn it is."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tandem.cluster.errors import Overloaded

LEAST_RETRY_SECONDS = 0.1
FIRST_GUESS_SECONDS = 1.0  # between two turns, before any was measured
SMOOTHING = 0.2


class AdmissionQueue:
    """Clients take turns, each client's requests in their order; who has the turn keeps it until it has a place.

    Bounded by requests and by the tokens they ask for; a request larger than the latter may wait alone. Owned by the
    gateway's event loop.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next client is first
        self._taken = False
        self._last_client = ""
        self._turn_seconds = FIRST_GUESS_SECONDS
        self._passed_on = 0.0
        self.requests = 0
        self.tokens = 0

    @asynccontextmanager
    async def turn(self, client: str, tokens: int, *, admitted: bool = False) -> AsyncGenerator[None]:
        """Waits for its turn, and has it inside the block. Overloaded when too much waits already, unless the request
        was admitted before."""
        if not admitted:
            self._check_room(tokens)
        self.requests += 1
        self.tokens += tokens
        try:
            await self._wait(client)
            try:
                yield
            finally:
                self._pass_on()
        finally:
            self.requests -= 1
            self.tokens -= tokens

    def _check_room(self, tokens: int) -> None:
        if self.requests >= self._max_requests:
            reason = f"{self.requests} requests are queued; gateway.max_queued is {self._max_requests}"
        elif self.requests and self.tokens + tokens > self._max_tokens:
            reason = (
                f"{self.tokens} tokens are queued and the request asks for {tokens}; "
                f"gateway.max_queued_tokens is {self._max_tokens}"
            )
        else:
            return
        # By then half of those that wait have had their turn, if turns go on as they did.
        seconds = self.requests * self._turn_seconds / 2
        raise Overloaded(reason, retry_after_seconds=max(LEAST_RETRY_SECONDS, seconds))

    async def _wait(self, client: str) -> None:
        if not self._taken:
            self._taken, self._last_client = True, client
            self._passed_on = time.monotonic()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """The turn goes to the first request of the next client that still waits."""
        now = time.monotonic()
        self._turn_seconds += SMOOTHING * (now - self._passed_on - self._turn_seconds)
        self._passed_on = now
        if next(iter(self._waiting), None) == self._last_client:
            self._waiting.move_to_end(self._last_client)
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            while turns and turns[0].done():  # cancelled
                turns.popleft()
            if not turns:
                continue
            turns.popleft().set_result(None)
            self._last_client = client
            if turns:
                self._waiting[client] = turns
            return
        self._taken = False
