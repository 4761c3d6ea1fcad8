"""Tokens of all requests of one decode worker, a message a step."""

import asyncio
import itertools
import secrets
from contextlib import suppress

import grpc
import grpc.aio

from tandem.cluster.token_inbox import NO_FEED, FeedLost, TokenInbox
from tandem.proto import worker_pb2, worker_pb2_grpc

FEED_SECONDS = 86400.0

Call = grpc.aio.UnaryStreamCall


class TokenFeed:
    """The call of Worker/Feed to one worker; the first request opens it, and the next one when it has ended.

    Whoever comes before it is open does without. Used on the event loop of its stub.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerStub, epoch: int) -> None:
        self._stub = stub
        self._epoch = epoch
        self._reader: asyncio.Task[None] | None = None
        self._feed = NO_FEED
        self._numbers = itertools.count(1)
        self._inboxes: dict[int, TokenInbox] = {}

    def inbox(self) -> TokenInbox:
        """Of a new request, until it leaves. Without a number where no feed is open."""
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())
        if self._feed == NO_FEED:
            return TokenInbox()
        inbox = TokenInbox(self._feed, next(self._numbers))
        self._inboxes[inbox.number] = inbox
        return inbox

    def leave(self, inbox: TokenInbox) -> None:
        self._inboxes.pop(inbox.number, None)

    async def close(self) -> None:
        """Nothing more comes. Idempotent."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait((self._reader,))

    async def _read(self) -> None:
        feed = secrets.randbits(63) + 1
        call: Call = self._stub.Feed(worker_pb2.FeedRequest(epoch=self._epoch, feed=feed), timeout=FEED_SECONDS)
        try:
            with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
                await call.initial_metadata()
                self._feed = NO_FEED if call.done() else feed
                async for message in call:
                    self._hand_out(message)
        finally:
            call.cancel()
            self._feed, lost = NO_FEED, FeedLost("the decode worker's feed ended before the request did")
            for inbox in self._inboxes.values():
                inbox.lose(lost)
            self._inboxes.clear()

    def _hand_out(self, message: worker_pb2.FedTokens) -> None:
        for number, token_id in zip(message.numbers, message.token_ids, strict=True):
            inbox = self._inboxes.get(number)
            if inbox is not None:  # its reader may have left
                inbox.add(token_id)
