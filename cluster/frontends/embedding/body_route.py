"""The common part of these routes: they read a body, make a call that a client may leave, and frame the answer."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.cluster.frontends.embedding.read_fields import Ignored
from tandem.cluster.frontends.http.body import read_body_of
from tandem.cluster.frontends.http.caller import client_of, credentials_of, host_of, unless_gone
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.generation_route import LONG_BODY
from tandem.cluster.requests.body_budget import BodyBudget, current_body
from tandem.cluster.requests.embedding.embeddings import Caller, Embeddings
from tandem.cluster.requests.embedding.reading import ReadAnswer
from tandem.cluster.requests.origin import current_origin
from tandem.cluster.requests.reading.readers import Readers
from tandem.proto import inference_pb2

AskedT = TypeVar("AskedT")
Read = Callable[[bytes | bytearray, tuple[str, ...]], tuple[AskedT, Ignored]]
"""Reads the bytes of a body; names are the model's. Raises HttpError."""


@dataclass(frozen=True)
class BodyRoute:
    """Long bodies are read in a process of their own."""

    embeddings: Embeddings
    names: tuple[str, ...]  # of the model; answers have the first
    max_bytes: int  # of a body
    bodies: BodyBudget
    readers: Readers

    async def serve(
        self,
        read: Read[AskedT],
        answer: Callable[[AskedT, Caller], Coroutine[Any, Any, None]],
        scope: Scope,
        receive: Receive,
        reply: Reply,
    ) -> None:
        """answer: computes and replies. A client that goes away ends it."""
        host = host_of(scope)
        held = self.bodies.open(host)
        try:
            names = tuple(filter(current_origin.get().access.allows, self.names))
            data = await read_body_of(scope, receive, held, self.max_bytes)
            if len(data) > LONG_BODY:
                reading = self.readers.run(host, read, data, names)
                asked, ignored = await unless_gone(receive, asyncio.ensure_future(reading))
            else:
                asked, ignored = read(data, names)
            del data
            current_body.set(held)
            reply.headers |= ignored
            caller = Caller(client_of(scope), host, next(iter(credentials_of(scope)), ""))
            await unless_gone(receive, asyncio.ensure_future(answer(asked, caller)))
        finally:
            held.release()

    def frame(self, prefix: str, request_id: str) -> dict[str, Any]:
        """The fields that an answer begins with."""
        return {"id": f"{prefix}-{request_id}", "created": int(time.time()), "model": self.names[0]}


def own_request_id() -> str:
    """Returns the request id of the call that this task answers."""
    return current_origin.get().request_id


def usage_of(answer: ReadAnswer) -> dict[str, Any]:
    """Returns the usage in the form of OpenAI's API."""
    usage: inference_pb2.Usage = answer.usage
    details = {"cached_tokens": usage.cached_tokens}
    tokens = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return {**tokens, "completion_tokens": 0, "prompt_tokens_details": details}
