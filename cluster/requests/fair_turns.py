"""Frequent work on an event loop that leaves room for rare work."""

import asyncio
from collections import deque
from collections.abc import Sequence

MOST_TOKENS = 16  # of a message of the usual cost, which is 1
TOP_COST = 7  # log-probabilities of each token that cost as much as a usual message
STOP_COST = 256  # characters of stop strings that do


def cost_of(top: int | None, stops: Sequence[str] = ()) -> int:
    """Of each message of a request. It has at most MOST_TOKENS // cost tokens, and one at least.

    top: log-probabilities of each token, or None. stops: which each token's text is searched for.
    """
    return 1 + (top or 0) // TOP_COST + sum(map(len, stops)) // STOP_COST


def most_tokens(cost: int) -> int:
    """Of a message."""
    return max(1, MOST_TOKENS // cost)


class FairTurns:
    """Lets tasks of a total cost go on in each round of the event loop. The others wait in order.

    Between two rounds the loop looks at its sockets, so a new request or a first token does not wait until all streams
    have been written. A stream that waits gathers tokens. Owned by the event loop.
    """

    def __init__(self, a_round: int) -> None:
        """a_round: the cost. The last task of a round may cost more than is left of it."""
        self._a_round = self._left = a_round
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._counting = False

    async def take(self, cost: int = 1) -> None:
        """Returns when it is the caller's turn."""
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._next_round)
        if self._left > 0 and not self._waiting:
            self._left -= cost
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, cost))
        await turn

    def _next_round(self) -> None:
        self._left = self._a_round
        while self._left > 0 and self._waiting:
            turn, cost = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._left -= cost
        self._counting = self._left < self._a_round
        if self._counting:
            asyncio.get_running_loop().call_soon(self._next_round)
