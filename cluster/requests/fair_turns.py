"""Frequent work on an event loop that leaves room for rare work."""

import asyncio
from collections import deque


class FairTurns:
    """Lets a number of tasks go on in each round of the event loop. The others wait in order.

    Between two rounds the loop looks at its sockets, so a new request or a first token does not wait until all streams
    have been written. A stream that waits gathers tokens. Owned by the event loop.
    """

    def __init__(self, a_round: int) -> None:
        self._a_round = self._left = a_round
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._counting = False

    async def take(self) -> None:
        """Returns when it is the caller's turn."""
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_round)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next_round(self) -> None:
        self._left = self._a_round
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._left -= 1
        self._counting = self._left < self._a_round
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_round)
