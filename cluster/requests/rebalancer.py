"""Moves decoding requests from a worker that has become slow to one that is faster."""

import asyncio
import time
from collections.abc import Callable

from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.routing.islands import Islands
from tandem.cluster.routing.rebalance import moves

PERIOD_SECONDS = 0.25  # longer than a move and the reports that show its effect


class Rebalancer:
    """Looks at the workers' loads regularly. Owned by the gateway's event loop."""

    def __init__(
        self,
        islands: Islands,
        requests: ActiveRequests,
        token_seconds: float,
        turn: Callable[[], tuple[int, int]] = lambda: (0, 1),
    ) -> None:
        """turn: returns this gateway process's number among the processes of all hosts, and their present count. All
        see the same loads, so they look in turns, by the time of day."""
        self._turn = turn
        self._islands = islands
        self._requests = requests
        self._token_seconds = token_seconds

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            process, processes = self._turn()
            if int(time.time() / PERIOD_SECONDS) % processes == process:
                self.look()

    def look(self) -> None:
        """Moves the requests that should move now."""
        links = self._islands.links()
        for move in moves(self._islands.loads(), self._token_seconds):
            self._requests.move(links[move.source.key], links[move.target.key], move.num_requests)
