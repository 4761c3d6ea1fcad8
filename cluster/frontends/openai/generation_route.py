"""POST routes that generate."""

import asyncio
from dataclasses import dataclass

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.caller import ClientGone, client_of, header, host_of, unless_gone
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.answer import Answer
from tandem.cluster.frontends.openai.generation_body import GenerationBody
from tandem.cluster.frontends.openai.read_body import read_request
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.body_budget import Body, BodyBudget, current_body
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.origin import current_origin
from tandem.cluster.requests.readers import Readers
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2
from tandem.workers.authentication import HEADER

BODY_SECONDS = 60.0  # for a client's body
LONG_BODY = 1 << 14  # bytes; longer ones are read in a process of their own


@dataclass(frozen=True)
class GenerationRoute:
    """POST of one kind of body."""

    body: type[GenerationBody]
    answer: type[Answer]
    requests: ActiveRequests
    model: str  # the name in answers
    tokenizer: Tokenizer | None
    max_bytes: int  # of a body
    max_tokens: int  # of a prompt with its output
    turns: FairTurns  # many requests may come at once
    bodies: BodyBudget
    readers: Readers
    aliases: tuple[str, ...] = ()  # other names that are accepted

    async def serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """Answers one request; a client that goes away ends it. HttpError, ClientGone, and as ActiveRequests.serve."""
        held = self.bodies.open(host_of(scope))
        try:
            body, request = await self._body(scope, receive, held)
            if body.model not in (None, self.model, *self.aliases):
                raise HttpError.other_model(body.model or "", (self.model, *self.aliases))
            current_body.set(held)
            request.request_id = current_origin.get().request_id
            generating = self._generate(body, request, scope, reply)
            del request  # which may be large, and the call long
            await unless_gone(receive, asyncio.ensure_future(generating))
        finally:
            held.release()

    async def _body(
        self, scope: Scope, receive: Receive, held: Body
    ) -> tuple[GenerationBody, inference_pb2.GenerateRequest]:
        """Without its prompt, and the request that it makes."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = await self._read(scope, receive, held)
        except TimeoutError:
            reason = f"the body did not come within {BODY_SECONDS:g} s"
            raise HttpError(408, reason, headers={"connection": "close"}) from None
        await self.turns.take()
        if len(data) > LONG_BODY:
            reading = self.readers.run(host_of(scope), read_request, self.body, data, self.max_tokens)
            return await unless_gone(receive, asyncio.ensure_future(reading))
        return read_request(self.body, data, self.max_tokens)

    async def _read(self, scope: Scope, receive: Receive, held: Body) -> bytearray:
        media_type = ";".join(header(scope, "content-type"))
        if media_type.partition(";")[0].strip().lower() != "application/json":
            raise HttpError(415, f"content-type is {media_type!r:.80}; application/json is accepted")
        if header(scope, "content-encoding"):
            raise HttpError(415, f"content-encoding is {header(scope, 'content-encoding')[0]!r:.80}; none is accepted")
        declared = int((header(scope, "content-length") or ["0"])[0])
        self._check_size(declared)
        held.hold(declared)
        data, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            data += message["body"]
            self._check_size(len(data))
            held.hold(max(declared, len(data)))
            more = message["more_body"]
        return data

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            # The connection stays open: a client that still sends would not read the answer of one that is closed.
            raise HttpError(
                413, f"the body has {size} bytes or more; {self.max_bytes} are accepted (gateway.max_message_mib)"
            )

    async def _generate(
        self, body: GenerationBody, request: inference_pb2.GenerateRequest, scope: Scope, reply: Reply
    ) -> None:
        answer = self.answer(body, self.model, self.tokenizer)
        messages: list[inference_pb2.GenerateResponse] = []

        async def write(message: inference_pb2.GenerateResponse) -> None:
            if body.stream:
                messages[:] = [message]  # the last one is all that will be needed
                await reply.event(answer.chunk(message))
            else:
                messages.append(message)

        try:
            credential = next(iter(header(scope, HEADER)), "")
            serving = self.requests.serve(
                request,
                client_of(scope),
                write,
                host=host_of(scope),
                credential=credential,
                open_ended=body.open_ended,
            )
            del request  # as above
            await serving
        except InvalidRequest as error:
            raise body.blame(error) from error
        if not body.stream:
            # With log-probabilities it takes a second for thousands of tokens, in which others must not wait.
            aside = body.num_logprobs is not None
            whole = await asyncio.to_thread(answer.whole, messages) if aside else answer.whole(messages)
            await reply.whole(200, whole)
        else:
            await reply.done(answer.usage_chunk(messages[-1]) if body.includes_usage else None)
