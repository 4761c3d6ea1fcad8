"""The HTTP routes that generate."""

import asyncio
from dataclasses import dataclass

from tandem.cluster.errors import InvalidRequest
from tandem.cluster.frontends.http.answers import Answer
from tandem.cluster.frontends.http.bodies import GenerationBody, read_body
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.protocol import CLIENT_ID_KEY
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2
from tandem.workers.authentication import HEADER
from tandem.workers.event_loop import unwatched

BODY_SECONDS = 60.0  # for a client's body
LONG_BODY = 1 << 16  # bytes; shorter ones are parsed faster than a thread starts


class ClientGone(Exception):
    """The client has closed its connection."""


@dataclass(frozen=True)
class GenerationRoute:
    """POST of one kind of body."""

    body: type[GenerationBody]
    answer: type[Answer]
    requests: ActiveRequests
    model: str  # the name in answers
    tokenizer: Tokenizer | None
    max_bytes: int  # of a body
    turns: FairTurns  # many requests may come at once
    aliases: tuple[str, ...] = ()  # other names that are accepted

    async def serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """Answers one request; a client that goes away ends it. HttpError, ClientGone, and as ActiveRequests.serve."""
        body = await self._body(scope, receive)
        if body.model not in (None, self.model, *self.aliases):
            raise HttpError.other_model(body.model or "", (self.model, *self.aliases))
        work = unwatched(asyncio.ensure_future(self._generate(body, scope, reply)))
        gone = unwatched(asyncio.ensure_future(_disconnected(receive)))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait((work, gone))

    async def _body(self, scope: Scope, receive: Receive) -> GenerationBody:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                data = await self._read(scope, receive)
        except TimeoutError:
            reason = f"the body did not come within {BODY_SECONDS:g} s"
            raise HttpError(408, reason, headers={"connection": "close"}) from None
        await self.turns.take()
        if len(data) > LONG_BODY:
            return await asyncio.to_thread(read_body, self.body, data)
        return read_body(self.body, data)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        media_type = ";".join(header(scope, "content-type"))
        if media_type.partition(";")[0].strip().lower() != "application/json":
            raise HttpError(415, f"content-type is {media_type!r:.80}; application/json is accepted")
        if header(scope, "content-encoding"):
            raise HttpError(415, f"content-encoding is {header(scope, 'content-encoding')[0]!r:.80}; none is accepted")
        declared = header(scope, "content-length")
        self._check_size(int(declared[0]) if declared else 0)
        data, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            data += message["body"]
            self._check_size(len(data))
            more = message["more_body"]
        return bytes(data)

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            # The connection stays open: a client that still sends would not read the answer of one that is closed.
            raise HttpError(
                413, f"the body has {size} bytes or more; {self.max_bytes} are accepted (gateway.max_message_mib)"
            )

    async def _generate(self, body: GenerationBody, scope: Scope, reply: Reply) -> None:
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
            await self.requests.serve(
                body.request(), client_of(scope), write, credential=credential, open_ended=body.open_ended
            )
        except InvalidRequest as error:
            raise body.blame(error) from error
        if not body.stream:
            # With log-probabilities it takes a second for thousands of tokens, in which others must not wait.
            aside = body.num_logprobs is not None
            whole = await asyncio.to_thread(answer.whole, messages) if aside else answer.whole(messages)
            await reply.whole(200, whole)
        else:
            await reply.done(answer.usage_chunk(messages[-1]) if body.includes_usage else None)


def header(scope: Scope, name: str) -> list[str]:
    """The values of a request's header, whose name is in lower case."""
    wanted = name.encode("latin-1")
    return [value.decode("latin-1") for key, value in scope["headers"] if key == wanted]


def client_of(scope: Scope) -> str:
    """Whose request it is: what the header client-id says, else the host it comes from."""
    given = header(scope, CLIENT_ID_KEY)
    return f"id:{given[0]}" if given and given[0] else f"http:{(scope['client'] or ('',))[0]}"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
