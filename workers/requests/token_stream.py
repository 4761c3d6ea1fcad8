"""Tokens on their way from the step thread to the gRPC calls of their requests."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.workers.errors import WorkerError
from tandem.workers.requests.feed import Feed
from tandem.workers.requests.token_run import TokenRun
from tandem.workers.sampling.finish import FinishReason
from tandem.workers.sampling.token_logprobs import TokenLogprobs


@dataclass(frozen=True)
class Prefilled:
    """How this worker computed the prompt of a request that it decodes; field by field as in worker.proto."""

    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float
    began_ns: int = 0  # in Unix time
    host_cached_tokens: int = 0
    disk_cached_tokens: int = 0


@dataclass
class Tokens:
    """Consecutive output tokens of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.RUNNING
    error: WorkerError | None = None  # why the request failed, with its last tokens
    fed: int = 0  # how many tokens went over a feed before these
    began_ns: int = 0  # see TokenStream
    prefilled: Prefilled | None = None  # with the last tokens, where this worker computed the prompt
    drafted: int = 0  # see TokenStream
    accepted: int = 0


class TokenStream:
    """One request's queue of tokens. Owned by the event loop; the step thread reaches it through TokenFanout.

    With a feed, tokens before the last one go there, under the stream's number. next() has the rest.
    """

    def __init__(self, feed: Feed | None = None, number: int = 0) -> None:
        self._feed = feed
        self._number = number
        self._fed = 0
        self._prefilled: Prefilled | None = None
        self._pending = Tokens()
        self._ready = asyncio.Event()
        self.last_written = 0.0
        self.drafted = 0  # tokens that were drafted so far, which the step thread counts, and
        self.accepted = 0  # those of them that were accepted
        self.began_ns = 0  # when all KV and the first token were there, in Unix time; the step thread says so

    def add(self, run: TokenRun) -> None:
        pending = self._pending
        pending.token_ids += run.token_ids
        if any(run.logprobs):
            pending.logprobs += [one for one in run.logprobs if one is not None]
        pending.finish_reason = run.reason

    def began(self, prefilled: Prefilled) -> None:
        """Notes that the prompt was computed here."""
        self._prefilled = prefilled

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
        """Returns all tokens that are there, at least one or the end."""
        await self._ready.wait()
        self._ready.clear()
        tokens, self._pending = self._pending, Tokens()
        tokens.fed = self._fed
        tokens.began_ns = self.began_ns
        tokens.drafted, tokens.accepted = self.drafted, self.accepted
        tokens.prefilled = self._prefilled if tokens.finish_reason != FinishReason.RUNNING else None
        return tokens


class TokenUpdate(NamedTuple):
    """The tokens that one step gave one request."""

    token_stream: TokenStream
    run: TokenRun
    prefilled: Prefilled | None = None  # with the first token of a prompt that was computed here


class TokenFanout:
    """Carries a step's tokens to all token streams with one wake-up of the event loop.

    A Python gRPC message costs tens of microseconds at each end, so a worker bounds their number. With n token streams
    open, each is written at most every n / max_messages_per_second seconds, with all tokens gathered since. A lone
    token stream gets every token at once. The end of a request is never held back.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop, max_messages_per_second: float) -> None:
        self._event_loop = event_loop
        self._seconds_per_message = 1.0 / max_messages_per_second

    def publish(self, updates: list[TokenUpdate]) -> None:
        """Called on the step thread, as all others; does not block."""
        if updates:
            self._event_loop.call_soon_threadsafe(self._deliver, updates)

    def fail(self, token_stream: TokenStream, error: WorkerError) -> None:
        self._event_loop.call_soon_threadsafe(token_stream.fail, error)

    def _deliver(self, updates: list[TokenUpdate]) -> None:
        now = self._event_loop.time()
        interval = len(updates) * self._seconds_per_message if len(updates) > 1 else 0.0
        for update in updates:
            stream = update.token_stream
            if update.prefilled is not None:
                stream.began(update.prefilled)
            stream.add(update.run)
            if stream.finished or now - stream.last_written >= interval:
                stream.flush(now)
