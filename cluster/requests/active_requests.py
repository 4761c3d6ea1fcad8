"""The requests under way, from every frontend."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from tandem.cluster.errors import DeadlineExceeded, InvalidRequest, Superseded, WorkerCallError, WorkerTimedOut
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.generation import Generation
from tandem.cluster.requests.replay import Replay
from tandem.cluster.requests.validation import RequestValidator, ValidRequest
from tandem.cluster.routing.router import Router
from tandem.cluster.routing.worker_link import WorkerLink
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2

MESSAGES_A_ROUND = 16  # each takes up to a tenth of a millisecond
UNREAD_SECONDS = 0.1  # behind the deadline
LEAST_TOKENS_LEFT = 16  # of a request that is moved
MOST_MOVES = 4  # of a request
LONG_TEXT = 4096  # characters; shorter ones take less than a thread does

Write = Callable[[inference_pb2.GenerateResponse], Awaitable[None]]


class ActiveRequests:
    """Validates requests, places them and passes on their messages. At most one request of an id runs.

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
        self._turns = FairTurns(MESSAGES_A_ROUND)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._generations: dict[str, Generation] = {}

    @property
    def running(self) -> int:
        """Requests that are placed or wait for room."""
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

        client: see Router.place. seconds: the client's own time limit, if it has one. open_ended: see
        RequestValidator.validate. Cancelling this call frees all that the request holds.
        Raises InvalidRequest, Overloaded, DeadlineExceeded, AttemptsExhausted, Superseded and ServerError.
        """
        arrived = time.perf_counter()
        limit = self._request_seconds if seconds is None else min(seconds, self._request_seconds)
        deadline = asyncio.get_running_loop().time() + limit
        valid = await self._validate(request, open_ended)
        generation = Generation(valid, arrived, self._tokenizer, self._eos_token_ids, self._turns)
        self._make_way(valid)
        # In a task of its own: a later call of the same id can end it, and this call still answers its client.
        work = self._running[valid.request_id] = asyncio.ensure_future(self._run(generation, client, write, deadline))
        self._generations[valid.request_id] = generation
        try:
            await work
        except WorkerCallError as error:
            if isinstance(error, WorkerTimedOut) and asyncio.get_running_loop().time() >= deadline:
                whose = "gateway.request_seconds" if limit == self._request_seconds else "the client's deadline"
                raise DeadlineExceeded(f"the request ran for {limit:g} s, which is {whose}") from error
            raise error.client_error(str(error)) from error
        except asyncio.CancelledError:
            if self._running.get(valid.request_id) is work:
                raise
            raise Superseded(f"a later call has taken request_id {valid.request_id!r} over") from None
        finally:
            if self._running.get(valid.request_id) is work:
                del self._running[valid.request_id], self._generations[valid.request_id]

    def move(self, source: WorkerLink, target: WorkerLink, count: int) -> int:
        """Lets up to `count` requests that `source` decodes go on at `target`: those with most tokens left.

        How many there were. One with few tokens left stays, and so does one that was moved often.
        """
        movable = [
            generation
            for generation in self._generations.values()
            if generation.decoded_by is source
            and generation.max_tokens_left >= LEAST_TOKENS_LEFT
            and generation.num_moves < MOST_MOVES
        ]
        movable.sort(key=lambda generation: -generation.max_tokens_left)
        for generation in movable[:count]:
            generation.move(target)
        return len(movable[:count])

    def _make_way(self, valid: ValidRequest) -> None:
        """A call that resumes a request ends the one that runs. That one's client has gone, perhaps unnoticed."""
        work = self._running.get(valid.request_id)
        if work is None:
            return
        if not valid.resumes:
            raise InvalidRequest(f"request_id {valid.request_id!r} is in use by a request that still runs")
        del self._running[valid.request_id], self._generations[valid.request_id]
        work.cancel()

    async def _validate(self, request: inference_pb2.GenerateRequest, open_ended: int | None) -> ValidRequest:
        # A template or a long text may take a while, and other requests must not wait for it.
        if request.HasField("chat") or len(request.text) > LONG_TEXT:
            return await asyncio.to_thread(self._validator.validate, request, open_ended)
        return self._validator.validate(request, open_ended)

    async def _run(self, generation: Generation, client: str, write: Write, deadline: float) -> None:
        replay = Replay(self._router, generation, client, self._max_attempts)
        limit = asyncio.timeout_at(deadline + UNREAD_SECONDS)
        try:
            # One limit for all: a limit for each message would add a tenth to its cost.
            async with limit, aclosing(replay.run(deadline)) as messages:
                async for message in messages:
                    await write(message)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the request's deadline passed while its client did not read") from None
