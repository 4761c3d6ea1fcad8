"""One request's tokens at the gateway, whichever way they come from its decode worker."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable
from typing import Any

from tandem.proto import worker_pb2

NO_FEED = 0


class FeedLost(Exception):
    """The worker's feed has ended, and tokens with it."""


class TokenInbox:
    """Those of the worker's feed, and the messages of the request's own call, in their order. Owned by the event loop.

    What its reader is slow to take gathers, at most as many tokens as the request may have. feed and number: by which
    the worker knows it.
    """

    def __init__(self, feed: int = NO_FEED, number: int = 0) -> None:
        self.feed = feed
        self.number = number
        self._fed: list[int] = []
        self._num_fed = 0
        self._messages: deque[worker_pb2.GeneratedTokens] = deque()
        self._end: BaseException | None = None  # of the call
        self._lost: BaseException | None = None
        self._ready = asyncio.Event()

    def add(self, token_id: int) -> None:
        """The next one of the feed."""
        self._fed.append(token_id)
        self._num_fed += 1
        self._ready.set()

    def lose(self, error: BaseException) -> None:
        """No more comes of the feed, or at all."""
        self._lost = error
        self._ready.set()

    def heed(self, answer: asyncio.Future[Any]) -> None:
        """The prefill worker's: where it is an error, the decode worker waits in vain. Else tokens may be sooner."""
        error = None if answer.cancelled() else answer.exception()
        if error is not None:
            self.lose(error)

    async def read(self, call: AsyncIterable[worker_pb2.GeneratedTokens]) -> None:
        """Takes in the messages of StartGenerate, until it ends."""
        try:
            async for message in call:
                self._messages.append(message)
                self._ready.set()
            self._end = EOFError("the decode worker's stream ended")
        except BaseException as error:
            self._end = error
            raise
        finally:
            self._ready.set()

    async def ready(self) -> None:
        """Returns when next() has something."""
        while not (self._fed or self._lost or self._has_message or (self._end and not self._messages)):
            self._ready.clear()
            await self._ready.wait()

    def next(self) -> worker_pb2.GeneratedTokens:
        """All of the feed's tokens that are there, else the next message. Raises what was lost, what ended the call, or
        EOFError where nothing was wrong with it."""
        if self._fed:
            fed, self._fed = self._fed, []
            return worker_pb2.GeneratedTokens(token_ids=fed)
        if self._has_message:
            return self._messages.popleft()
        error = self._lost or self._end
        assert error is not None, "ready() has returned"
        raise error

    @property
    def _has_message(self) -> bool:
        return bool(self._messages) and self._messages[0].fed <= self._num_fed
