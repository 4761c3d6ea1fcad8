"""Frequent work on an event loop that leaves room for rare work."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

MOST_TOKENS = 16  # of a message of the usual cost, which is 1
TOP_COST = 7  # so many log-probabilities of each token cost as much as a usual message
STOP_COST = 256  # so many characters of stop strings do


def cost_of(top: int | None, stops: Sequence[str] = ()) -> int:
    """Returns the cost of each message of a request. A message has at most MOST_TOKENS // cost tokens, and at least
    one.

    top: log-probabilities of each token, or None. stops: which each token's text is searched for.
    """
    return 1 + (top or 0) // TOP_COST + sum(map(len, stops)) // STOP_COST


def most_tokens(cost: int) -> int:
    """Returns the largest number of tokens in a message."""
    return max(1, MOST_TOKENS // cost)


class FairTurns:
    """Lets work of a limited total cost run in each round of the event loop. The rest waits in order.

    Between two rounds the loop looks at its sockets, so a new request or a first token does not wait until all streams
    have been written. A stream that waits gathers tokens. Owned by the event loop.
    """

    def __init__(self, a_round: int) -> None:
        """a_round: the cost of a round. The last turn of a round may cost more than is left of it."""
        self._a_round = self._left = a_round
        self._waiting: deque[tuple[Callable[[], object], int]] = deque()
        self._counting = False

    def enter(self, call: Callable[[], object], cost: int = 1) -> None:
        """Calls `call` in its turn, in a later round. It must not raise."""
        self._waiting.append((call, cost))
        if not self._counting:
            self._count()

    async def take(self, cost: int = 1) -> None:
        """Returns when it is the caller's turn."""
        if not self._counting:
            self._count()
        if self._left > 0 and not self._waiting:
            self._left -= cost
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.enter(lambda: turn.done() or turn.set_result(None), cost)  # done: cancelled
        await turn

    def _count(self) -> None:
        self._counting = True
        asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._left = self._a_round
        try:
            while self._left > 0 and self._waiting:
                call, cost = self._waiting.popleft()
                self._left -= cost
                call()
        finally:  # a call that raises is a defect, and must not end all others' turns
            self._counting = self._left < self._a_round
            if self._counting:
                asyncio.get_running_loop().call_soon(self._next_round)
