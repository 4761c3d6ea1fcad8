"""Reads what the decode worker sends for one request, by turns with other requests."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from tandem.cluster.requests.fair_turns import FairTurns, most_tokens
from tandem.cluster.routing.token_inbox import TokenInbox
from tandem.proto import worker_pb2

T = TypeVar("T")
Take = Callable[[list[int]], Coroutine[Any, Any, bool]]
"""Passes the feed's tokens on. Returns False if the request's task has to look."""


class Arrivals:
    """Reads an inbox. Owned by the event loop.

    If a client's writes do not wait, the event loop itself passes the feed's tokens on in their turn, and wakes no task
    for them (docs/decisions/0136).
    """

    def __init__(self, inbox: TokenInbox, turns: FairTurns, cost: int) -> None:
        """cost: of a message."""
        self._inbox = inbox
        self._turns = turns
        self._cost = cost
        self._most = most_tokens(cost)
        self._take: Take | None = None
        self._waiting: asyncio.Future[Begun[bool] | None]

    async def next(self, take: Take | None) -> worker_pb2.GeneratedTokens | None:
        """Returns the next tokens that are there. None: take() wants the task to look. Raises as TokenInbox.next() and
        take().

        take: gets the tokens of the feed meanwhile. It runs outside of the task until it waits for something.
        """
        self._take = take
        self._waiting = asyncio.get_running_loop().create_future()
        self._inbox.notify(self._enter)
        begun = await self._waiting
        if begun is None:
            return self._inbox.next(self._most)
        await begun
        return None

    def _enter(self) -> None:
        self._turns.enter(self._turn, self._cost)

    def _turn(self) -> None:
        waiting, take = self._waiting, self._take
        if waiting.done():  # cancelled
            return
        token_ids = [] if take is None else self._inbox.fed(self._most)
        if take is None or not token_ids:
            waiting.set_result(None)
            return
        try:
            begun = Begun(take(token_ids))
        except BaseException as error:  # a tokenizer's panic is no Exception
            waiting.set_exception(error)
            return
        if begun.value:
            self._inbox.notify(self._enter)
        else:
            waiting.set_result(begun)


class Begun(Generic[T]):
    """A coroutine that has run until it first waited. Awaiting this object runs the rest."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self.at_once = self._ended = False
        self.value: T | None = None  # what it returned at once
        try:
            self._wants = work.send(None)
        except StopIteration as end:
            self.at_once = self._ended = True
            self.value = end.value

    def __await__(self) -> Generator[Any, Any, None]:
        """Runs the rest as `yield from` would, which cannot begin in the middle."""
        while not self._ended:
            try:
                got = yield self._wants
            except BaseException as error:
                step, given = self._work.throw, error
            else:
                step, given = self._work.send, got
            try:
                self._wants = step(given)
            except StopIteration:
                self._ended = True
