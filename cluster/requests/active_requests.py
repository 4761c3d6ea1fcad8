"""The requests under way, whichever door they came through."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import grpc
import grpc.aio

from tandem.cluster.errors import CallError, DeadlineExceeded, InvalidRequest, Overloaded, ServerError, Superseded
from tandem.cluster.requests.call_limit import RETRY_SECONDS
from tandem.cluster.requests.fair_turns import Turns
from tandem.cluster.requests.generation import Generation
from tandem.cluster.requests.replay import Attempts
from tandem.cluster.requests.validation import RequestValidator, ValidRequest
from tandem.cluster.routing.router import Router
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2

MESSAGES_A_ROUND = 16  # each takes up to a tenth of a millisecond
UNREAD_SECONDS = 0.1  # behind the deadline
LONG_TEXT = 4096  # characters; shorter ones take less than a thread does

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class Intake:
    """Validates requests, places them and hands on what comes of them; of one id at most one runs.

    Owned by the gateway's event loop.
    """

    def __init__(
        self,
        validator: RequestValidator,
        router: Router,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        *,
        max_attempts: int,
        request_seconds: float,
    ) -> None:
        self._validator = validator
        self._router = router
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_attempts = max_attempts
        self._request_seconds = request_seconds
        self._turns = Turns(MESSAGES_A_ROUND)
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """Requests that wait for a place or have one."""
        return len(self._running)

    async def serve(
        self,
        request: inference_pb2.GenerateRequest,
        client: str,
        write: Write,
        *,
        seconds: float | None = None,
        open_ended: int | None = None,
    ) -> None:
        """Runs a request to its end and gives each message for its client to `write`, one at a time.

        client: see Router.place. seconds: how long the client waits, if it says. open_ended: see
        RequestValidator.validate. Who cancels it frees all that the request holds.
        Raises InvalidRequest, Overloaded, DeadlineExceeded, AttemptsExhausted, Superseded and ServerError.
        """
        arrived = time.perf_counter()
        limit = self._request_seconds if seconds is None else min(seconds, self._request_seconds)
        deadline = asyncio.get_running_loop().time() + limit
        valid = await self._validate(request, open_ended)
        generation = Generation(valid, arrived, self._tokenizer, self._eos_token_ids, self._turns)
        self._make_way(valid)
        # A task of its own: a later call of the same id can end it, and this one still answers its client.
        work = self._running[valid.request_id] = asyncio.ensure_future(self._run(generation, client, write, deadline))
        try:
            await work
        except grpc.aio.AioRpcError as error:
            late = asyncio.get_running_loop().time() >= deadline
            if late and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                whose = "gateway.request_seconds" if limit == self._request_seconds else "the client's deadline"
                raise DeadlineExceeded(f"the request ran for {limit:g} s, which is {whose}") from error
            raise _passed_on(error) from error
        except asyncio.CancelledError:
            if self._running.get(valid.request_id) is work:
                raise
            raise Superseded(f"a later call has taken request_id {valid.request_id!r} over") from None
        finally:
            if self._running.get(valid.request_id) is work:
                del self._running[valid.request_id]

    def _make_way(self, valid: ValidRequest) -> None:
        """A call that resumes a request ends the one that runs: its client has gone, though this gateway may not have
        noticed."""
        work = self._running.get(valid.request_id)
        if work is None:
            return
        if not valid.resumes:
            raise InvalidRequest(f"request_id {valid.request_id!r} is in use by a request that still runs")
        del self._running[valid.request_id]
        work.cancel()

    async def _validate(self, request: inference_pb2.GenerateRequest, open_ended: int | None) -> ValidRequest:
        # A template may run for a while, and so may the tokenizer of a long text: other requests must not wait for it.
        if request.HasField("chat") or len(request.text) > LONG_TEXT:
            return await asyncio.to_thread(self._validator.validate, request, open_ended)
        return self._validator.validate(request, open_ended)

    async def _run(self, generation: Generation, client: str, write: Write, deadline: float) -> None:
        attempts = Attempts(self._router, generation, client, self._max_attempts)
        limit = asyncio.timeout_at(deadline + UNREAD_SECONDS)
        try:
            # One limit, for one a message is a tenth of its cost. Who waits for anything else hears of it there, first.
            async with limit, aclosing(attempts.run(deadline)) as messages:
                async for message in messages:
                    await write(message)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the request's deadline passed while its client did not read") from None


def _passed_on(error: grpc.aio.AioRpcError) -> CallError:
    """What a worker's status means to the client of the gateway."""
    text = f"a worker answered {error.code().name}: {error.details()}"
    if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(text, RETRY_SECONDS)
    kinds: dict[grpc.StatusCode, type[CallError]] = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    }
    return kinds.get(error.code(), ServerError)(text)
