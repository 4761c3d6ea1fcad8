"""Orders that change the cluster: from the calls that give them to the cluster's launcher, which carries them out."""

import asyncio
import itertools
from typing import Any

from tandem.cluster.adapters.values import AdapterOrder, AdapterSet
from tandem.cluster.errors import DeadlineExceeded
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome

POLL_SECONDS = 10.0
Order = ScaleOrder | AdapterOrder
Outcome = ScaleOutcome | AdapterSet


class Orders:
    """The orders of one gateway process. Owned by its event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._orders: asyncio.Queue[Order | None] = asyncio.Queue()
        self._outcomes: dict[int, asyncio.Future[Any]] = {}

    def next_number(self) -> int:
        """Returns the number of an order to come."""
        return next(self._numbers)

    async def carry_out(self, order: Order, seconds: float) -> Any:
        """Returns the outcome of an order. Raises the launcher's TandemError, and DeadlineExceeded after so many
        seconds."""
        outcome = self._outcomes[order.number] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait(order)
        try:
            return await asyncio.wait_for(outcome, seconds)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within {seconds:g} s") from None
        finally:
            del self._outcomes[order.number]

    async def next(self) -> Order | None:
        """Returns the next order whose caller still waits. None after POLL_SECONDS without an order, and after
        close()."""
        try:
            async with asyncio.timeout(POLL_SECONDS):
                while (order := await self._orders.get()) is not None and order.number not in self._outcomes:
                    pass  # its caller has gone, and nothing was begun
                return order
        except TimeoutError:
            return None

    def answer(self, number: int, outcome: Outcome | BaseException) -> None:
        """Gives an order's outcome to its caller, if the caller still waits."""
        waiting = self._outcomes.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, BaseException):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)

    def close(self) -> None:
        """Ends the queue: next() returns None."""
        self._orders.put_nowait(None)
