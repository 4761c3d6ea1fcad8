"""POST routes that generate."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.cluster.adapters.names import ServedNames
from tandem.cluster.errors import InvalidRequest, UnknownModel
from tandem.cluster.frontends.http.body import read_body_of
from tandem.cluster.frontends.http.caller import client_of, credentials_of, host_of, unless_gone
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.answer import AnyAnswer
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.choices import Choices
from tandem.cluster.frontends.openai.read_body import read_requests
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.answers import Write
from tandem.cluster.requests.body_budget import Body, BodyBudget, current_body
from tandem.cluster.requests.fair_turns import FairTurns
from tandem.cluster.requests.origin import current_origin, own_id
from tandem.cluster.requests.reading.readers import Readers
from tandem.proto import inference_pb2

WriteOf = Callable[[int, inference_pb2.GenerateResponse], Coroutine[Any, Any, None]]
"""Writes an answer to the prompt of that index."""
MakeAnswer = Callable[[str, AskingBody, list[inference_pb2.GenerateRequest]], Awaitable[AnyAnswer]]
"""Makes what answers a body under a model's name, before its requests are sent. It may change these. HttpError."""

LONG_BODY = 1 << 14  # bytes; longer ones are read in a process of their own


@dataclass(frozen=True)
class GenerationRoute:
    """POST of one kind of body."""

    body: type[AskingBody]
    answer: MakeAnswer
    requests: ActiveRequests
    names: ServedNames  # that a body may give as its model
    max_bytes: int  # of a body
    max_tokens: int  # of a prompt with its output
    turns: FairTurns  # many requests may come at once
    bodies: BodyBudget
    readers: Readers

    async def serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        """Answers one request; a client that goes away ends it. HttpError, ClientGone, and as ActiveRequests.serve."""
        held = self.bodies.open(host_of(scope))
        try:
            body, requests = await self._body(scope, receive, held)
            origin = current_origin.get()
            self.names.adapter(body.model, origin.access.allows)  # raises UnknownModel
            origin.access.check_many(len(requests))
            held.requests = len(requests)
            current_body.set(held)
            reply.headers |= body.headers
            for index in range(len(requests)):  # no name may hold a request, which may be large
                own = own_id(origin.given_id or origin.request_id) if index else origin.request_id
                requests[index].request_id = requests[index].request_id or own
                requests[index].model = body.model or ""
            generating = self._generate(body, requests, scope, reply)
            await unless_gone(receive, asyncio.ensure_future(generating))
        finally:
            held.release()

    async def _body(
        self, scope: Scope, receive: Receive, held: Body
    ) -> tuple[AskingBody, list[inference_pb2.GenerateRequest]]:
        """Returns the body without its prompts, and the requests that it makes."""
        data = await read_body_of(scope, receive, held, self.max_bytes)
        await self.turns.take()
        if len(data) > LONG_BODY:
            reading = self.readers.run(host_of(scope), read_requests, self.body, data, self.max_tokens)
            return await unless_gone(receive, asyncio.ensure_future(reading))
        return read_requests(self.body, data, self.max_tokens)

    async def _generate(
        self, body: AskingBody, requests: list[inference_pb2.GenerateRequest], scope: Scope, reply: Reply
    ) -> None:
        """Takes the requests out of their list: they may be large, and the call long."""
        count, turn = len(requests), asyncio.Lock()
        answer = await self.answer(self.names.answer(body.model, current_origin.get().access.allows), body, requests)
        choices = Choices(answer, count, body.num_answers)

        async def write(prompt: int, message: inference_pb2.GenerateResponse) -> None:
            if not body.stream:
                choices.keep(prompt, message)
            elif count == 1:
                await reply.events(choices.events(prompt, message))
            else:
                async with turn:
                    await reply.events(choices.events(prompt, message))

        if count == 1:
            await self._serve(body, requests.pop(), scope, partial(write, 0))
        else:
            await self._serve_all(body, requests, scope, write)
        if not body.stream:
            await reply.whole(200, choices.whole())
        else:
            await reply.end(choices.end())

    async def _serve_all(
        self, body: AskingBody, requests: list[inference_pb2.GenerateRequest], scope: Scope, write: WriteOf
    ) -> None:
        """Runs all requests at once. A failure ends the others, and its error names its prompt."""

        async def one(prompt: int, serving: Awaitable[None]) -> None:
            try:
                await serving
            except Exception as error:
                if call is not None:
                    call.failed = True
                if isinstance(error, HttpError):
                    raise _naming(error, prompt) from None
                raise

        call = current_body.get()
        try:
            async with asyncio.TaskGroup() as group:
                for prompt in range(len(requests)):
                    serving = self._serve(body, requests.pop(0), scope, partial(write, prompt))
                    group.create_task(one(prompt, serving))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _serve(
        self, body: AskingBody, request: inference_pb2.GenerateRequest, scope: Scope, write: Write
    ) -> None:
        try:
            serving = self.requests.serve(
                request,
                client_of(scope),
                write,
                host=host_of(scope),
                credential=next(iter(credentials_of(scope)), ""),
                open_ended=body.open_ended,
            )
            del request  # which may be large, and the call long
            await serving
        except UnknownModel:  # removed since
            raise
        except InvalidRequest as error:
            raise body.blame(error) from error


def _naming(error: HttpError, prompt: int) -> HttpError:
    """Returns the error with the index of the prompt that it is about."""
    text = str(error)
    if text.startswith("prompt"):
        text = f"prompt[{prompt}]{text.removeprefix('prompt')}"
    elif "prompt" in text:
        text = f"prompt[{prompt}]: {text}"
    return HttpError(error.status, text, param=error.param, code=error.code, headers=error.headers)
