"""Clients take turns at long work, a few at a time."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class ClientTurns:
    """At most `places` blocks run at a time, and one of each client. Others wait, clients in turns. For one event loop.

    So a client that asks for much keeps a place from nobody else, unless there are as many such clients as places.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncGenerator[None]:
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(given)
        self._give()
        try:
            await given
            yield
        finally:
            if given.done() and not given.cancelled():
                self._free += 1
                self._running[client] -= 1
                if not self._running[client]:
                    del self._running[client]
            self._give()

    def _give(self) -> None:
        """Gives free places to the clients that have waited longest."""
        for client in list(self._waiting):
            if not self._free:
                return
            if self._running[client]:
                continue
            line = self._waiting[client]
            while line and line[0].done():  # cancelled
                line.popleft()
            if line:
                line.popleft().set_result(None)
                self._free -= 1
                self._running[client] += 1
                self._waiting.move_to_end(client)
            if not line:
                del self._waiting[client]
