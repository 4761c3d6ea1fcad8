"""Tokens of all requests of one decode worker, a message a step."""

import asyncio
import itertools
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.cluster.errors import PlacementLost, WorkerCallError
from tandem.cluster.errors.statuses import worker_errors
from tandem.cluster.routing.token_inbox import TokenInbox
from tandem.proto import worker_pb2, worker_pb2_grpc

RENEW_SECONDS = 3600.0
FEED_SECONDS = RENEW_SECONDS + 86400.0  # no request lives longer than the latter


@dataclass(eq=False)
class _Feed:
    """One call of Worker/Feed."""

    call: Any
    number: int
    renewed_at: float  # in the event loop's time
    inboxes: dict[int, TokenInbox] = field(default_factory=dict)  # of the requests that named it, by their numbers

    async def read(self) -> None:
        """Puts each token into its inbox, until the call ends."""
        async for message in self.call:
            for number, token_id in zip(message.numbers, message.token_ids, strict=True):
                inbox = self.inboxes.get(number)
                if inbox is not None:  # its reader may have left
                    inbox.add(token_id)

    def end(self, lost: Callable[[], PlacementLost]) -> None:
        self.call.cancel()
        for inbox in self.inboxes.values():
            inbox.lose(lost())


class TokenFeed:
    """The feed of one worker. A request opens it, and replaces it when it has ended or grown old.

    Requests that named the old feed stay on it to their end. Requests that come before a feed is open do without one.
    Used on the event loop of its stub.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerStub, epoch: int, lost: Callable[[], PlacementLost]) -> None:
        """lost: makes the error of a request that loses its feed."""
        self._stub = stub
        self._epoch = epoch
        self._lost = lost
        self._numbers = itertools.count(1)
        self._feeds: dict[int, _Feed] = {}
        self._current: _Feed | None = None
        self._opening: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def inbox(self) -> TokenInbox:
        """Yields the inbox of a new request, until leave(). It has no number if no feed is open."""
        feed = self._current
        if self._opening is None and (feed is None or asyncio.get_running_loop().time() >= feed.renewed_at):
            self._opening = asyncio.create_task(self._serve())
            self._tasks.add(self._opening)
            self._opening.add_done_callback(self._tasks.discard)
        if feed is None:
            return TokenInbox()
        inbox = TokenInbox(feed.number, next(self._numbers))
        feed.inboxes[inbox.number] = inbox
        return inbox

    def leave(self, inbox: TokenInbox) -> None:
        feed = self._feeds.get(inbox.feed)
        if feed is not None:
            feed.inboxes.pop(inbox.number, None)
            self._end_unused(feed)

    async def close(self) -> None:
        """Closes the feed. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self) -> None:
        """Opens a feed that replaces the current one, and reads it to its end."""
        number, renewed_at = secrets.randbits(63) + 1, asyncio.get_running_loop().time() + RENEW_SECONDS
        request = worker_pb2.FeedRequest(epoch=self._epoch, feed=number)
        feed = _Feed(self._stub.Feed(request, timeout=FEED_SECONDS), number, renewed_at)
        try:
            with suppress(WorkerCallError), worker_errors("the decode worker"):
                await feed.call.initial_metadata()
                self._opening = None
                if not feed.call.done():
                    before, self._current, self._feeds[number] = self._current, feed, feed
                    self._end_unused(before)
                    await feed.read()
        finally:
            self._current = None if self._current is feed else self._current
            self._opening = None if self._opening is asyncio.current_task() else self._opening
            self._feeds.pop(number, None)
            feed.end(self._lost)

    def _end_unused(self, feed: _Feed | None) -> None:
        if feed is not None and feed is not self._current and not feed.inboxes:
            feed.call.cancel()
