"""The requests under way, from every frontend."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import DeadlineExceeded, Superseded, Unavailable, WorkerCallError, WorkerTimedOut
from tandem.cluster.peers.claims import Claim, Claims, Holder, in_use, superseded
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.cluster.requests.answers import Answers
from tandem.cluster.requests.body_budget import release_current_body
from tandem.cluster.requests.charging.charges import RequestCharge
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.forks import NOT_FORKED, ForkedFrom, take_tokens
from tandem.cluster.requests.generation import Generation, Write
from tandem.cluster.requests.observer import Observe, RequestObserver, all_of
from tandem.cluster.requests.origin import current_origin
from tandem.cluster.requests.reading.guide_checks import GuideChecks
from tandem.cluster.requests.reading.readers import Readers
from tandem.cluster.requests.validation import RequestValidator, ValidRequest, refused_prompt
from tandem.cluster.routing.router import Router
from tandem.cluster.routing.worker_link import WorkerLink
from tandem.cluster.text.chat_template import ChatTemplateError
from tandem.cluster.text.tokenizer import Tokenizer, TokenizerFailed
from tandem.proto import inference_pb2, peer_pb2
from tandem.workers.sampling.finish import FinishReason

MESSAGES_A_ROUND = 16  # each takes up to a tenth of a millisecond
UNREAD_SECONDS = 0.1  # behind the deadline
LEAST_TOKENS_LEFT = 16  # of a request that is moved
MOST_MOVES = 4  # of a request
LONG_TEXT = 4096  # characters; shorter ones take less than a thread does
END_SECONDS = 1.0  # a request that is cancelled ends at once, unless something is very wrong


@dataclass(eq=False)
class _Call:
    """One call, from its validation to its end."""

    claim: Claim
    answers: Answers
    credential: str  # by which its caller was let in
    salt: bytes  # of its prefixes
    fork: ForkedFrom
    settled: bool = False  # no other process runs a call of that id
    work: "asyncio.Task[None]" = field(init=False)


class ActiveRequests:
    """Validates requests, places them and passes on their messages. At most one request of an id runs, in all the
    gateway's processes.

    Owned by the gateway's event loop.
    """

    def __init__(
        self,
        validator: RequestValidator,
        readers: Readers,
        router: Router,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        table: GatewayTable,
        claims: Claims,
        *,
        max_attempts: int,
        request_seconds: float,
        observe: Observe | None = None,
        origin: int = 0,
    ) -> None:
        """origin: the origin of this process's claims."""
        self._observe = observe or all_of(())
        self._validator = validator
        self._readers = readers
        self._guides = GuideChecks(readers, validator.vocab_size, eos_token_ids)
        self._router = router
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_attempts = max_attempts
        self._request_seconds = request_seconds
        self._turns = FairTurns(MESSAGES_A_ROUND)
        self._table = table
        self._claims = claims
        self._origin = origin
        self._running: dict[str, _Call] = {}
        self._ended: Unavailable | None = None

    @property
    def running(self) -> int:
        """The number of requests that are placed or wait for room in this process."""
        return len(self._running)

    async def serve(
        self,
        request: inference_pb2.GenerateRequest,
        client: str,
        write: Write,
        *,
        host: str = "",
        credential: str = "",
        seconds: float | None = None,
        open_ended: int | None = None,
    ) -> None:
        """Runs a request to its end and gives each message for its client to `write`, one at a time.

        client: see Router.place. host: the client's, by which clients take turns while requests are read. seconds: the
        client's own time limit, if it has one. credential, open_ended: see RequestValidator.validate. Cancelling this
        call frees all that the request holds. Raises InvalidRequest, RateLimited, Overloaded, DeadlineExceeded,
        AttemptsExhausted, Superseded, ServerError, and the error given to end().
        """
        if self._ended is not None:
            raise self._ended
        arrived = time.perf_counter()
        limit = self._request_seconds if seconds is None else min(seconds, self._request_seconds)
        deadline = asyncio.get_running_loop().time() + limit
        observer, access = self._observe(request.request_id, client, arrived), current_origin.get().access
        answers: Answers | None = None
        is_named = bool(request.request_id)
        is_open = open_ended is not None and not request.sampling.HasField("max_tokens")
        try:
            access.look()
            valid, fork = await self._validate(request, open_ended, credential, host)
            del request  # the message may be large, and the call long
            release_current_body()
            charge = RequestCharge(access, valid, is_open=is_open)
            valid = await charge.count()
            with charge.until_end():
                observer.validated(valid)
                charge.answers = answers = self._answers(valid, arrived, observer, client)
                request_id = access.scoped(valid.request_id)
                claim = Claim(request_id, valid.resumes, self._claims.clock.next(), self._origin)
                call = self._enter(_Call(claim, answers, credential, valid.prompt.salt, fork))
                # An id that the gateway has just made runs nowhere else.
                holders = self._claims.asked(claim) if is_named else []
                await self._finish(call, holders, client, write, deadline, limit)
        except BaseException as error:
            _end(observer, answers, error)
            raise
        _end(observer, answers, None)

    def _answers(self, valid: ValidRequest, arrived: float, observer: RequestObserver, client: str) -> Answers:
        """Makes the answers. Each has an observer of its own; the first one uses the request's."""
        answers = Answers(
            valid, lambda one: Generation(one, arrived, self._tokenizer, self._eos_token_ids, self._turns)
        )
        first, *others = answers.generations
        first.observer = observer
        for one in others:
            one.observer = self._observe(valid.request_id, client, arrived)
            one.observer.validated(valid)
        return answers

    async def _finish(
        self, call: _Call, holders: Sequence[Holder], client: str, write: Write, deadline: float, limit: float
    ) -> None:
        """Runs a call that has entered to its end. limit: the seconds that led to the deadline."""
        call.settled = not holders
        # In a task of its own: a later call of the same id can end it, and this call still answers its client.
        call.work = asyncio.ensure_future(self._run(call, holders, client, write, deadline))
        try:
            await call.work
        except WorkerCallError as error:
            if isinstance(error, WorkerTimedOut) and asyncio.get_running_loop().time() >= deadline:
                whose = "gateway.request_seconds" if limit == self._request_seconds else "the client's deadline"
                raise DeadlineExceeded(f"the request ran for {limit:g} s, which is {whose}") from error
            raise error.client_error(str(error)) from error
        except asyncio.CancelledError:
            if self._ended is not None:
                raise self._ended from None
            if self._running.get(call.claim.request_id) is call:
                raise
            raise superseded(call.claim.request_id) from None
        finally:
            self._leave(call)

    def end(self, error: Unavailable) -> None:
        """Ends all calls with this error, and every later one."""
        self._ended = error
        for call in self._running.values():
            call.work.cancel()

    def move(self, source: WorkerLink, target: WorkerLink, count: int, *, leaves: bool = False) -> int:
        """Moves up to `count` requests that `source` decodes to `target`: those with most tokens left.

        Returns how many were moved. A request with few tokens left stays, and so does a request that was moved often,
        unless the source leaves. A request whose adapter the target lacks stays, too.
        """
        movable = [
            generation
            for call in self._running.values()
            for generation in call.answers.generations
            if generation.decoded_by is source
            and not generation.slides
            and (not generation.adapter or generation.adapter in target.adapters)
            and (leaves or generation.max_tokens_left >= LEAST_TOKENS_LEFT)
            and (leaves or generation.num_moves < MOST_MOVES)
        ]
        movable.sort(key=lambda generation: -generation.max_tokens_left)
        for generation in movable[:count]:
            generation.move(target)
        return len(movable[:count])

    async def give(self, claim: Claim) -> peer_pb2.ClaimOutcome:
        """Ends the call that another process claims, and returns when it has ended; or returns why it goes on."""
        self._claims.clock.see(claim.stamp)
        call = self._running.get(claim.request_id)
        if call is None:
            return peer_pb2.CLAIM_OUTCOME_FREE
        later = call.claim.is_after(claim)
        if not claim.resumes:
            # If two calls begin at once, the earlier one goes on: both sides decide alike.
            mine = call.settled or not later
            return peer_pb2.CLAIM_OUTCOME_IN_USE if mine else peer_pb2.CLAIM_OUTCOME_FREE
        if later and call.claim.resumes:
            return peer_pb2.CLAIM_OUTCOME_SUPERSEDED
        if later and not call.settled:
            return peer_pb2.CLAIM_OUTCOME_FREE  # it will be refused there
        await self._end(call)
        return peer_pb2.CLAIM_OUTCOME_FREE

    async def give_host(self, claim: Claim) -> peer_pb2.ClaimOutcome:
        """Answers another host's claim for all processes of this host, as give() does for this process."""
        outcome = await self.give(claim)
        holders = self._claims.holders(claim.request_id)
        if outcome != peer_pb2.CLAIM_OUTCOME_FREE or not holders:
            return outcome
        return await self._claims.outcome(claim, holders)

    def _enter(self, call: _Call) -> _Call:
        """Registers a call. A call that resumes a request ends the running one, whose client has gone, perhaps
        unnoticed."""
        claim = call.claim
        before = self._running.get(claim.request_id)
        if before is not None:
            if not claim.resumes:
                raise in_use(claim.request_id)
            self._leave(before)
            before.work.cancel()
        self._running[claim.request_id] = call
        self._table.add(self._table.id_column(claim.request_id), 1)
        self._table.put(Column.ACTIVE, len(self._running))
        return call

    def _leave(self, call: _Call) -> None:
        """Unregisters a call. Idempotent."""
        request_id = call.claim.request_id
        if self._running.get(request_id) is call:
            del self._running[request_id]
            self._table.add(self._table.id_column(request_id), -1)
            self._table.put(Column.ACTIVE, len(self._running))

    async def _end(self, call: _Call) -> None:
        self._leave(call)
        call.work.cancel()
        await asyncio.wait([call.work], timeout=END_SECONDS)

    async def _validate(
        self, request: inference_pb2.GenerateRequest, open_ended: int | None, credential: str, host: str
    ) -> tuple[ValidRequest, ForkedFrom]:
        self._validator.check(request)
        tokens, fork = None, NOT_FORKED
        if request.HasField("fork"):
            tokens, fork = self._take_fork(request, credential)
        elif self._validator.is_long(request):
            try:
                tokens = await self._readers.tokens(host, request, self._validator.most_kept(request))
            except (ChatTemplateError, TokenizerFailed) as error:
                raise refused_prompt(request, error) from error
        # A template or a text may take a while, and other requests must not wait for it.
        if tokens is None and (request.HasField("chat") or len(request.text) > LONG_TEXT):
            valid = await asyncio.to_thread(self._validator.validate, request, open_ended, credential, tokens)
        else:
            valid = self._validator.validate(request, open_ended, credential, tokens)
        if valid.params.guided is not None:
            await self._guides.check(host, valid.params.guided)
        return valid, fork

    def _take_fork(self, request: inference_pb2.GenerateRequest, credential: str) -> tuple[Int64Array, ForkedFrom]:
        """Takes the tokens of a fork: see take_tokens(). A caller that may not share the parent's prefixes does not
        learn that it runs."""
        parent = current_origin.get().access.scoped(request.fork.request_id)
        call, salt = self._running.get(parent), self._validator.salt(request.cache_salt, credential)
        theirs = call is not None and (call.credential, call.salt) == (credential, salt)
        return take_tokens(request.fork, call.answers.answer(request.fork.index) if call and theirs else None)

    async def _run(self, call: _Call, holders: Sequence[Holder], client: str, write: Write, deadline: float) -> None:
        if holders:
            await self._claims.take(call.claim, holders)
            call.settled = True
        limit = asyncio.timeout_at(deadline + UNREAD_SECONDS)
        try:
            # One limit for all: a limit for each message would add a tenth to its cost.
            async with limit:
                await call.answers.run(self._router, client, self._max_attempts, deadline, write, call.fork)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the request's deadline passed while its client did not read") from None


def _end(observer: RequestObserver, answers: Answers | None, error: BaseException | None) -> None:
    """Tells observers how a request ended. An answer that has its last message ended well, whatever came later."""
    if answers is None:
        observer.ended(FinishReason.ERROR, error, inference_pb2.Usage(), inference_pb2.Timings())
        return
    for generation in answers.generations:
        reason = generation.finish_reason
        if not generation.finished:
            left = isinstance(error, asyncio.CancelledError | Superseded)
            reason = FinishReason.ABORT if left else FinishReason.ERROR
        generation.observer.ended(reason, error, generation.usage, generation.timings)
