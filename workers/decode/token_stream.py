"""Tokens on their way from the step thread to the gRPC stream of one request."""

import asyncio
from dataclasses import dataclass, field

from tandem.workers.decode.feed import Feed
from tandem.workers.errors import WorkerError
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.token_logprobs import TokenLogprobs


@dataclass
class Tokens:
    """Consecutive output tokens of one request; `error` is set on the last ones of a request that failed. fed: how many
    went over a feed before these."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.RUNNING
    error: WorkerError | None = None
    fed: int = 0


class TokenStream:
    """One request's queue. Owned by the event loop's thread; the step thread reaches it through StreamFanout.

    Where it has a feed, what comes before the last token goes there, under its number; next() has the rest.
    """

    def __init__(self, feed: Feed | None = None, number: int = 0) -> None:
        self._feed = feed
        self._number = number
        self._fed = 0
        self._pending = Tokens()
        self._ready = asyncio.Event()
        self.last_written = 0.0

    def add(self, token_ids: list[int], logprobs: list[TokenLogprobs], finish_reason: FinishReason) -> None:
        self._pending.token_ids += token_ids
        self._pending.logprobs += logprobs
        self._pending.finish_reason = finish_reason

    def fail(self, error: WorkerError) -> None:
        self._pending.finish_reason = FinishReason.ERROR
        self._pending.error = error
        self._ready.set()

    @property
    def finished(self) -> bool:
        return self._pending.finish_reason != FinishReason.RUNNING

    def flush(self, now: float) -> None:
        self.last_written = now
        if self._feed is None or self.finished:
            self._ready.set()
            return
        self._feed.add(self._number, self._pending.token_ids)
        self._fed += len(self._pending.token_ids)
        self._pending.token_ids.clear()

    async def next(self) -> Tokens:
        """All tokens that are there, at least one or the end."""
        await self._ready.wait()
        self._ready.clear()
        tokens, self._pending = self._pending, Tokens()
        tokens.fed = self._fed
        return tokens


@dataclass(frozen=True)
class StreamUpdate:
    """What one step gave one request."""

    stream: TokenStream
    token_id: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason


class StreamFanout:
    """Carries a step's tokens to all streams with one wake-up of the event loop.

    A Python gRPC message costs tens of microseconds at each of its ends, so a worker bounds how many its clients get:
    with n streams open, a stream is written at most every n / max_messages_per_second seconds, and gets what has
    gathered since. A lone stream gets every token at once; the end of a request is never held back.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop, max_messages_per_second: float) -> None:
        self._event_loop = event_loop
        self._seconds_per_message = 1.0 / max_messages_per_second

    def publish(self, updates: list[StreamUpdate]) -> None:
        """Called on the step thread; does not block."""
        if updates:
            self._event_loop.call_soon_threadsafe(self._deliver, updates)

    def fail(self, stream: TokenStream, error: WorkerError) -> None:
        self._event_loop.call_soon_threadsafe(stream.fail, error)

    def _deliver(self, updates: list[StreamUpdate]) -> None:
        now = self._event_loop.time()
        interval = len(updates) * self._seconds_per_message if len(updates) > 1 else 0.0
        for update in updates:
            stream = update.stream
            tokens = [] if update.token_id is None else [update.token_id]
            logprobs = [] if update.logprobs is None else [update.logprobs]
            stream.add(tokens, logprobs, update.finish_reason)
            if stream.finished or now - stream.last_written >= interval:
                stream.flush(now)
