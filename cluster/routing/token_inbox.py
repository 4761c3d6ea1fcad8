"""One request's tokens at the gateway, from its decode worker's feed and from the request's own call."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Callable
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
        self._notify: Callable[[], None] | None = None  # of what comes next

    def add(self, token_id: int) -> None:
        """Adds the feed's next token."""
        self._fed.append(token_id)
        self._num_fed += 1
        if self._notify is not None:
            self._came()

    def lose(self, error: BaseException) -> None:
        """Ends the feed: it brings no more tokens. next() raises the error after the tokens that are there."""
        self._lost = error
        self._came()

    def watch(self, answer: asyncio.Future[Any]) -> None:
        """Ends the feed if the prefill worker answers with an error: the decode worker would wait in vain."""
        error = None if answer.cancelled() else answer.exception()
        if error is not None:
            self.lose(error)

    async def read(self, call: AsyncIterable[worker_pb2.GeneratedTokens]) -> None:
        """Takes in the messages of StartGenerate, until it ends."""
        async for message in call:
            self._messages.append(message)
            self._came()

    def end(self, error: BaseException) -> None:
        """Ends the call. next() raises the error after its last message."""
        self._end = error
        self._came()

    def notify(self, call: Callable[[], None]) -> None:
        """Calls `call` once next() has something, perhaps at once. It replaces a call that still waits."""
        self._notify = call
        self._came()

    def fed(self, most: int) -> list[int]:
        """Returns the feed's next tokens that are there, at most so many, perhaps none."""
        fed = self._fed
        return [fed.popleft() for _ in range(min(len(fed), most))]

    def next(self, most: int) -> worker_pb2.GeneratedTokens:
        """Returns the next tokens that are there, at most so many. Raises the error given to lose() or end()."""
        if self._fed:
            return worker_pb2.GeneratedTokens(token_ids=self.fed(most))
        if self._has_message:
            return _first_of(self._messages, most)
        error = self._lost or self._end
        assert error is not None, "ready() has returned"
        raise error

    def _came(self) -> None:
        call = self._notify
        if call is not None and (self._fed or self._lost or self._has_message or (self._end and not self._messages)):
            self._notify = None
            call()

    @property
    def _has_message(self) -> bool:
        return bool(self._messages) and self._messages[0].fed <= self._num_fed


def _first_of(messages: deque[worker_pb2.GeneratedTokens], most: int) -> worker_pb2.GeneratedTokens:
    """Returns the first message, or its first tokens if it has more than `most`."""
    message = messages[0]
    if len(message.token_ids) <= most:
        return messages.popleft()
    first = worker_pb2.GeneratedTokens(token_ids=message.token_ids[:most], logprobs=message.logprobs[:most])
    del message.token_ids[:most]
    del message.logprobs[:most]
    return first
