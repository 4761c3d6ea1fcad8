"""One request at the gateway, from its arrival to its last message."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import InvalidRequest, PlacementLost, ServerError
from tandem.cluster.requests.arrivals import Arrivals, Begun
from tandem.cluster.requests.fair_turns import FairTurns, cost_of
from tandem.cluster.requests.observer import UNOBSERVED, RequestObserver
from tandem.cluster.requests.prompt_logprobs import PromptLogprobs
from tandem.cluster.requests.text_output import TextOutput
from tandem.cluster.requests.validation import ValidRequest
from tandem.cluster.routing.islands import LinkPair
from tandem.cluster.routing.prefill_hints import EarlyToken
from tandem.cluster.routing.router import Placement
from tandem.cluster.routing.token_inbox import TokenInbox
from tandem.cluster.routing.worker_link import Sent, WorkerLink
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2, worker_pb2
from tandem.workers.event_loop import unwatched
from tandem.workers.sampling.finish import FinishReason, FinishRule
from tandem.workers.wire.messages import prompt_to_proto, sampling_to_proto
from tandem.workers.wire.prompt_spec import PromptSpec

PLANNED = 0.85  # of a first token's target: the rest is for pushes, networks and steps in flight
Write = Callable[[inference_pb2.GenerateResponse], Coroutine[Any, Any, None]]
"""Gives a message to the client, and returns when the next one may come. It may begin outside of a task."""


class Moved(Exception):
    """Raised when the request goes on at another pair of workers: its decode worker so far sends the KV."""

    def __init__(self, pair: LinkPair) -> None:
        super().__init__("the request was moved")
        self.pair = pair


class Generation:
    """One client's request and the messages sent for it. run() is called for each placement.

    RemoteSend and StartGenerate go out together. The first token comes from the prefill worker, all others from the
    decode worker. Raises InvalidRequest if the tokens that a client claims to have cannot begin its request.
    """

    def __init__(
        self,
        request: ValidRequest,
        arrived: float,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        turns: FairTurns,
    ) -> None:
        """turns: each message but the first waits for one."""
        self._turns = turns
        self._cost = cost_of(request.params.logprobs, request.params.stop)  # of a message
        self.observer: RequestObserver = UNOBSERVED  # until its owner sets one
        # A request for no tokens samples a hidden one, so that its prompt is computed like all others.
        self._hides_output = request.params.max_tokens == 0
        if self._hides_output:
            request = replace(request, params=replace(request.params, max_tokens=1))
        self.prompt_logprobs = PromptLogprobs(request, turns)
        self._request = request
        self._arrived = arrived
        self._awaited = arrived  # when its client began to wait for the first token
        self._output = TextOutput(request.params, tokenizer)
        self._rule = FinishRule.of(request.params, eos_token_ids)
        self._usage = inference_pb2.Usage(prompt_tokens=len(request.prompt) - request.prompt.encoder.padding)
        self._timings = inference_pb2.Timings()
        self._first_is_last = False
        self._sent: list[int] = []
        self._decoding: tuple[Placement, TokenInbox] | None = None
        self._moved = False  # the next placement does not follow a loss
        self.finish_reason = FinishReason.RUNNING  # until the client has the last message
        self.complete = False  # both workers of this placement have ended the request by themselves
        self.placement: Placement | None = None  # the last one
        for received in request.received:
            self._take_received(received.token_ids)

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def adapter(self) -> bytes:
        """The digest of its LoRA adapter; empty for none."""
        return self._request.prompt.adapter

    @property
    def slides(self) -> bool:
        return self._request.prompt.sliding is not None

    @property
    def can_replay(self) -> bool:
        """Returns whether the tokens so far, sent as a prompt, give the next token. They do not once a token has left
        the window."""
        return not self._sent or self._request.prompt.fits_window(len(self._sent))

    @property
    def prompt(self) -> PromptSpec:
        """The prompt of the next placement: the tokens sent are part of it."""
        return self._request.prompt.going_on(self._sent, whole=self.prompt_logprobs.wanted)

    @property
    def tokens(self) -> Int64Array:
        """The tokens of its prompt, and those that its client has, int64 [n]."""
        return self._request.prompt.going_on(self._sent).token_ids

    def fits_window(self, position: int) -> bool:
        """Returns whether no token had left the window when the request had its first `position` tokens."""
        prompt = self._request.prompt
        return position <= len(prompt) or prompt.fits_window(position - len(prompt))

    @property
    def max_tokens_left(self) -> int:
        return self._request.params.max_tokens - len(self._sent)

    @property
    def finished(self) -> bool:
        return self.finish_reason != FinishReason.RUNNING

    @property
    def usage(self) -> inference_pb2.Usage:
        self._usage.output_tokens = len(self._sent)
        return self._usage

    @property
    def timings(self) -> inference_pb2.Timings:
        return self._timings

    @property
    def num_sent(self) -> int:
        return len(self._sent)

    async def run(self, placement: Placement, timeout: float, write: Write) -> None:
        """Writes the messages for the client. timeout in seconds bounds both calls.

        Raises WorkerCallError, ServerError, and Moved after a call of move().
        """
        self._first_is_last = self.complete = False
        self._begin(placement)
        # Log-probabilities never come over a feed: such a request outlasts it.
        inbox = TokenInbox() if self._request.params.logprobs is not None else placement.decode.feed.inbox()
        send, start = self._calls(placement, inbox)
        calls: list[Any] = []
        try:
            answer = scores = None
            if self.prompt_logprobs.wanted:
                calls.append(scores := await placement.prefill.prompt_logprobs(placement.request_id, timeout))
            if not placement.is_local:
                calls.append(sent := placement.prefill.send(send, timeout))  # first: the other call waits for its KV
                calls.append(answer := unwatched(asyncio.ensure_future(self._answer(sent, placement))))
                answer.add_done_callback(lambda _: placement.prefill.forget_prompt(placement.request_id))
            calls.append(placement.decode.generate(start, inbox, timeout))
            if scores is not None:
                async for message in self.prompt_logprobs.messages(scores):
                    await write(message)
            if answer is not None:
                await write(self._first_message(await self._first_token(placement.early_token, answer)))
                if self.finished and not self._first_is_last:
                    return  # a stop string: the decode worker does not know
                answer.add_done_callback(inbox.watch)
            self._decoding = (placement, inbox)
            arrivals, take = Arrivals(inbox, self._turns, self._cost), None
            while True:
                tokens = await arrivals.next(take)
                if tokens is None:
                    if self.finished:
                        return
                    continue
                reason = FinishReason(tokens.finish_reason)
                if reason == FinishReason.ERROR:
                    raise ServerError(f"the decode worker ended the request with {reason.name}")
                if reason == FinishReason.ABORT:
                    raise PlacementLost("the decode worker dropped the request")
                self.complete = reason != FinishReason.RUNNING
                if self.complete:
                    self.observer.decoded(tokens.decoded)
                    self._usage.drafted_tokens += tokens.decoded.drafted_tokens
                    self._usage.accepted_tokens += tokens.decoded.accepted_tokens
                if self._first_is_last:
                    return  # and now the decode worker has agreed
                if placement.is_local:
                    self._count_local(placement, tokens)
                elif answer is not None and (self.complete or self._request.params.stop):
                    await answer  # the last message needs its timings
                message = self._message(list(tokens.token_ids), reason)
                message.logprobs.extend(tokens.logprobs[: len(message.token_ids)])
                writing = Begun(write(message))
                await writing
                if self.finished:
                    return
                # The workers' figures of the prompt are counted now.
                take = partial(self._take, write) if writing.at_once else None
        finally:
            self._decoding = None
            for call in calls:
                call.cancel()
            placement.decode.feed.leave(inbox)

    @property
    def decoded_by(self) -> WorkerLink | None:
        """The worker that decodes the request, from its first token to its last."""
        if self._decoding is None or not self._sent or self._moved or self.finished:
            return None
        return self._decoding[0].decode

    @property
    def num_moves(self) -> int:
        return self._timings.moves

    def await_anew(self) -> None:
        """Restarts the target for its first token: until now the request was not to begin."""
        self._awaited = time.perf_counter()

    def move(self, target: WorkerLink) -> None:
        """Ends run() after the tokens that are there, with Moved: the request goes on at another decode worker."""
        if self._decoding is not None:
            placement, inbox = self._decoding
            self._moved = True
            inbox.lose(Moved(LinkPair(target, placement.decode, 0.0, len(self._request.prompt) + len(self._sent) - 1)))

    def _begin(self, placement: Placement) -> None:
        if self._moved:
            self._timings.moves += 1
        else:
            self._timings.attempts += 1
        self.placement = placement
        self.observer.placed(placement, moved=self._moved)
        self._moved = False
        if self._timings.attempts + self._timings.moves == 1:
            self._timings.queue_seconds = time.perf_counter() - self._arrived
            self._timings.expected_first_token_seconds = placement.expected_seconds
        self._timings.pages = placement.reservation.pages

    def _count_local(self, placement: Placement, tokens: worker_pb2.GeneratedTokens) -> None:
        """Counts the times of a prompt that the decode worker computes itself. Its first token ends the wait for it."""
        placement.prefill.forget_prompt(placement.request_id)
        if not self._timings.first_token_seconds:
            self._timings.first_token_seconds = time.perf_counter() - self._arrived
            self._usage.cached_tokens = placement.reservation.matched_tokens
        if tokens.HasField("prefilled"):
            self._timings.prefill_seconds += tokens.prefilled.prefill_seconds
            self._count_stored(tokens.prefilled)
            self.observer.prefilled(tokens.prefilled)

    def _count_stored(self, prompt: worker_pb2.RemoteSendResponse | worker_pb2.Prefilled) -> None:
        usage = self._usage
        usage.host_cached_tokens = min(prompt.host_cached_tokens, usage.cached_tokens)
        usage.disk_cached_tokens = min(prompt.disk_cached_tokens, usage.host_cached_tokens)

    def _take_received(self, token_ids: Sequence[int]) -> None:
        """Counts these tokens and their text as sent."""
        for count, token_id in enumerate(token_ids, start=1):
            reason = self._rule.reason(token_id, count)
            if reason == FinishReason.RUNNING:
                reason = self._output.add([token_id], reason).finish_reason
            if reason != FinishReason.RUNNING:
                raise InvalidRequest(
                    f"resume.token_ids[{count - 1}] is {token_id}, which ends the request ({reason.name.lower()}); "
                    "only a request that has not ended can be resumed"
                )
        self._sent += token_ids

    def _calls(
        self, placement: Placement, inbox: TokenInbox
    ) -> tuple[worker_pb2.RemoteSendRequest, worker_pb2.StartGenerateRequest]:
        params, num_output = self._request.params, len(self._sent)
        least = max(0, params.min_tokens - num_output)
        scored = params.prompt_logprobs if self.prompt_logprobs.wanted else None
        sampling = sampling_to_proto(
            replace(
                params,
                max_tokens=self.max_tokens_left,
                min_tokens=least,
                bad_words=(),
                prompt_logprobs=scored,
                first_token_seconds=self._first_token_seconds_left,
            )
        )
        send = worker_pb2.RemoteSendRequest(
            request_id=placement.request_id,
            epoch=placement.prefill.epoch,
            sampling=sampling,
            reservation=placement.reservation,
            prompt=prompt_to_proto(self.prompt),
        )
        start = worker_pb2.StartGenerateRequest(
            request_id=placement.request_id,
            epoch=placement.decode.epoch,
            reservation_id=placement.reservation.reservation_id,
            sampling=sampling,
            feed=inbox.feed,
            number=inbox.number,
            num_output=num_output,
        )
        if not placement.is_local:
            start.sampling.ClearField("prompt_logprobs")
        return send, start

    @property
    def _first_token_seconds_left(self) -> float | None:
        """Returns the seconds by which workers plan a placement's first token; 0 or less if they are over. If the
        client has tokens already, the target counts from this placement on: the reader waits now, for the next token.
        """
        target = self._request.params.first_token_seconds
        if target is None:
            return None
        return PLANNED * target - (0.0 if self._sent else time.perf_counter() - self._awaited)

    async def _answer(self, call: Sent, placement: Placement) -> worker_pb2.RemoteSendResponse:
        begun = bool(self._timings.first_token_seconds)  # in an earlier placement
        sent = await call
        self._timings.prefill_seconds += sent.prefill_seconds
        self._timings.push_seconds += sent.push_seconds
        self._timings.bytes_pushed += sent.bytes_pushed
        pushed = len(self._request.prompt) + len(self._sent) - placement.reservation.matched_tokens
        placement.prefill.pushed_to(placement.decode, pushed, sent.push_seconds)
        if not begun:
            cached = max(sent.cached_tokens - self._request.prompt.encoder.padding, 0)
            self._usage.cached_tokens = min(cached, self._usage.prompt_tokens)
            self._count_stored(sent)
        self.observer.prefilled(sent)
        return sent

    async def _first_token(
        self, early: EarlyToken | None, answer: "asyncio.Future[worker_pb2.RemoteSendResponse]"
    ) -> worker_pb2.FirstToken:
        """Returns the early token, unless it may be the last one: the last message needs the answer's timings."""
        if early is not None:
            await asyncio.wait((early, answer), return_when=asyncio.FIRST_COMPLETED)
            if early.done() and not self._may_end_with(early.result().token_id):
                return early.result()
        sent = await answer
        logprobs = sent.logprobs if sent.HasField("logprobs") else None
        return worker_pb2.FirstToken(token_id=sent.first_token, logprobs=logprobs)

    def _may_end_with(self, token_id: int) -> bool:
        stops = len(self._request.params.stop) > 0
        return stops or self._rule.reason(token_id, len(self._sent) + 1) != FinishReason.RUNNING

    def _first_message(self, first: worker_pb2.FirstToken) -> inference_pb2.GenerateResponse:
        if not self._timings.first_token_seconds:
            self._timings.first_token_seconds = time.perf_counter() - self._arrived
        reason = self._rule.reason(first.token_id, len(self._sent) + 1)
        self._first_is_last = reason != FinishReason.RUNNING
        message = self._message([first.token_id], reason)
        if first.HasField("logprobs") and message.token_ids:
            message.logprobs.append(first.logprobs)
        return message

    async def turn(self) -> None:
        """Waits for this request's turn for work that takes as long as a message."""
        await self._turns.take()

    async def _take(self, write: Write, token_ids: list[int]) -> bool:
        """See Take."""
        await write(self._message(token_ids, FinishReason.RUNNING))
        return not self.finished

    def _message(self, token_ids: list[int], reason: FinishReason) -> inference_pb2.GenerateResponse:
        if self.prompt_logprobs.wanted:
            raise PlacementLost("the prompt's log-probabilities ended before its first token")
        if self._hides_output:
            token_ids, reason = [], FinishReason.LENGTH
        part = self._output.add(token_ids, reason)
        if part.num_tokens < len(token_ids):
            token_ids = token_ids[: part.num_tokens]
        self._sent += token_ids
        self.observer.tokens(part.num_tokens)
        message = inference_pb2.GenerateResponse(
            request_id=self.request_id, token_ids=token_ids, text=part.text, adapter=self.adapter
        )
        if part.finish_reason != FinishReason.RUNNING:
            message.finish_reason = int(part.finish_reason)  # type: ignore[assignment]  # same numbers
            self._say_why(message, part.stop)
            self.finish_reason = part.finish_reason
            self._timings.total_seconds = time.perf_counter() - self._arrived
            message.usage.CopyFrom(self.usage)
            message.timings.CopyFrom(self._timings)
        return message

    def _say_why(self, message: inference_pb2.GenerateResponse, stop: str | None) -> None:
        if stop is not None:
            message.stop_string = stop
        elif message.finish_reason == inference_pb2.FINISH_REASON_STOP and message.token_ids:
            last = message.token_ids[-1]
            if last in self._request.params.stop_token_ids:
                message.stop_token_id = last
