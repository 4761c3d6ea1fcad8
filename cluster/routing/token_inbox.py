"""One request's tokens at the gateway, from its decode worker's feed and from the request's own call."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable
from typing import Any

from tandem.proto import worker_pb2

NO_FEED = 0


class TokenInbox:
    """Puts a feed's tokens and the call's messages in order. Owned by the event loop.

    Tokens gather while the reader is slow, at most as many as the request may have.
    """

    def __init__(self, feed: int = NO_FEED, number: int = 0) -> None:
        """feed, number: the worker's names for the feed, and for the request on it."""
        self.feed = feed
        self.number = number
        self._fed = deque[int]()
        self._num_fed = 0
        self._messages: deque[worker_pb2.GeneratedTokens] = deque()
        self._end: BaseException | None = None  # of the call
        self._lost: BaseException | None = None  # of the feed or the prefill worker
        self._ready = asyncio.Event()

    def add(self, token_id: int) -> None:
        """The feed's next token."""
        self._fed.append(token_id)
        self._num_fed += 1
        self._ready.set()

    def lose(self, error: BaseException) -> None:
        """The feed brings no more. next() raises the error behind the tokens that are there."""
        self._lost = error
        self._ready.set()

    def watch(self, answer: asyncio.Future[Any]) -> None:
        """Where the prefill worker's answer is an error, the decode worker waits in vain."""
        error = None if answer.cancelled() else answer.exception()
        if error is not None:
            self.lose(error)

    async def read(self, call: AsyncIterable[worker_pb2.GeneratedTokens]) -> None:
        """Takes in the messages of StartGenerate, until it ends."""
        async for message in call:
            self._messages.append(message)
            self._ready.set()

    def end(self, error: BaseException) -> None:
        """The call has ended. next() raises the error behind its last message."""
        self._end = error
        self._ready.set()

    async def ready(self) -> None:
        """Returns when next() has something."""
        while not (self._fed or self._lost or self._has_message or (self._end and not self._messages)):
            self._ready.clear()
            await self._ready.wait()

    def next(self, most: int) -> worker_pb2.GeneratedTokens:
        """The next tokens that are there, at most so many. Raises what lose() or end() was given."""
        if self._fed:
            return worker_pb2.GeneratedTokens(token_ids=[self._fed.popleft() for _ in range(min(len(self._fed), most))])
        if self._has_message:
            return _first_of(self._messages, most)
        error = self._lost or self._end
        assert error is not None, "ready() has returned"
        raise error

    @property
    def _has_message(self) -> bool:
        return bool(self._messages) and self._messages[0].fed <= self._num_fed


def _first_of(messages: deque[worker_pb2.GeneratedTokens], most: int) -> worker_pb2.GeneratedTokens:
    """The first message, or its first tokens where it has more than `most`."""
    message = messages[0]
    if len(message.token_ids) <= most:
        return messages.popleft()
    first = worker_pb2.GeneratedTokens(token_ids=message.token_ids[:most], logprobs=message.logprobs[:most])
    del message.token_ids[:most]
    del message.logprobs[:most]
    return first
