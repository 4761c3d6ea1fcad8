"""/tokenize and /detokenize, as vLLM has them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import FailFast, Field
from typing_extensions import TypeAliasType

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.adapters.names import ServedNames, shown
from tandem.cluster.errors import CallError, InvalidRequest, UnknownModel
from tandem.cluster.frontends.http.body import read_body_of
from tandem.cluster.frontends.http.caller import host_of, unless_gone
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.generation_route import LONG_BODY
from tandem.cluster.frontends.openai.messages import Messages
from tandem.cluster.frontends.openai.read_body import read_object
from tandem.cluster.frontends.openai.tool_fields import ToolFields
from tandem.cluster.protocol import MAX_MESSAGES, build_request
from tandem.cluster.requests.body_budget import BodyBudget
from tandem.cluster.requests.charging.charges import admitted
from tandem.cluster.requests.origin import current_origin
from tandem.cluster.requests.reading.readers import Readers
from tandem.cluster.text.chat_template import ChatTemplateError
from tandem.cluster.text.prompt_tokens import prompt_tokens
from tandem.cluster.text.tokenizer import Tokenizer, TokenizerFailed
from tandem.proto import inference_pb2

MAX_TOKENS = 1 << 16  # of a body, and that are named
Ids = TypeAliasType("Ids", Annotated[list[int], FailFast(), Field(max_length=MAX_TOKENS)])
T = TypeVar("T")


class TokenizeBody(ToolFields):
    """POST /tokenize."""

    model: str | None = Field(default=None, description="the served model's name")
    prompt: str | None = Field(default=None, description="text")
    messages: Messages | None = Field(default=None, description=f"a list of 1 to {MAX_MESSAGES} messages")
    return_token_strs: bool = Field(default=False, description="true or false")
    add_special_tokens: bool | None = Field(default=None, description="true or false")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="an object")
    add_generation_prompt: bool | None = Field(default=None, description="true or false")
    continue_final_message: bool = Field(default=False, description="true or false")

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        """Returns a request with this prompt. Raises InvalidRequest and HttpError."""
        options: dict[str, Any] = {"add_special_tokens": self.add_special_tokens}
        if self.messages is None:
            return build_request(self.prompt or "", _given(options), None)
        options |= {"add_generation_prompt": self.add_generation_prompt, "tools": self.template_tools or None}
        options |= {"template_kwargs": self.chat_template_kwargs or None}
        options |= {"continue_final_message": self.continue_final_message or None}
        return build_request([one.turn for one in self.messages], _given(options), None)


class DetokenizeBody(BodyObject):
    """POST /detokenize."""

    model: str | None = Field(default=None, description="the served model's name")
    tokens: Ids = Field(description=f"a list of at most {MAX_TOKENS} token ids")


@dataclass(frozen=True)
class Tokenization:
    """Both routes. Long bodies are read, and long texts tokenized, in a process of their own: it may take seconds."""

    tokenizer: Tokenizer | None
    served: ServedNames
    max_bytes: int  # of a body
    max_tokens: int  # of a prompt with its output
    bodies: BodyBudget
    readers: Readers

    async def tokenize(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        tokenizer = self._required()
        (named, message), is_long = await self._read(scope, receive, read_tokenize)
        ids = await self._tokens(scope, receive, message, is_long)
        if named and len(ids) > MAX_TOKENS:
            reason = f"return_token_strs is true for {len(ids)} tokens; at most {MAX_TOKENS} are named"
            raise HttpError(400, reason, param="return_token_strs")
        names = await asyncio.to_thread(list, map(tokenizer.token_text, ids.tolist())) if named else None
        answer = {"count": len(ids), "max_model_len": self.max_tokens, "tokens": ids, "token_strs": names}
        await reply.whole(200, answer)

    async def count(
        self,
        read: Callable[[bytes | bytearray, tuple[str, ...]], inference_pb2.GenerateRequest],
        scope: Scope,
        receive: Receive,
        reply: Reply,
    ) -> None:
        """/v1/messages/count_tokens. read: gives the request of a body with these names of the model."""
        self._required()
        message, is_long = await self._read(scope, receive, read)
        await reply.whole(200, {"input_tokens": len(await self._tokens(scope, receive, message, is_long))})

    async def _tokens(
        self, scope: Scope, receive: Receive, message: inference_pb2.GenerateRequest, is_long: bool
    ) -> Int64Array:
        try:
            if is_long:
                reading = self.readers.tokens(host_of(scope), message)
                return await unless_gone(receive, asyncio.ensure_future(reading))
            return prompt_tokens(self.tokenizer, message)
        except (ChatTemplateError, TokenizerFailed, InvalidRequest) as error:
            raise HttpError(400, str(error)) from error

    async def detokenize(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        tokenizer = self._required()
        tokens, _ = await self._read(scope, receive, read_detokenize)
        wrong = next((token for token in tokens if not 0 <= token < tokenizer.vocab_size), None)
        if wrong is not None:
            reason = f"tokens has {wrong}; the tokenizer has {tokenizer.vocab_size} ids, from 0 on"
            raise HttpError(400, reason, param="tokens")
        text = await asyncio.to_thread(tokenizer.decode, tokens, skip_special_tokens=False)
        await reply.whole(200, {"prompt": text})

    async def _read(
        self, scope: Scope, receive: Receive, read: Callable[[bytes | bytearray, tuple[str, ...]], T]
    ) -> tuple[T, bool]:
        """Reads the body. Returns what `read` makes of it, and whether it is long."""
        host = host_of(scope)
        held = self.bodies.open(host)
        charge = await admitted(current_origin.get().access, 0, 0)  # a request without tokens
        try:
            data = await read_body_of(scope, receive, held, self.max_bytes)
            names = self.served.seen(current_origin.get().access.allows)
            if len(data) <= LONG_BODY:
                return read(data, names), False
            reading = self.readers.run(host, read, data, names)
            return await unless_gone(receive, asyncio.ensure_future(reading)), True
        except (HttpError, CallError):  # a wrong body does not count
            if charge is not None:
                charge.cancel()
            raise
        finally:
            held.release()

    def _required(self) -> Tokenizer:
        if self.tokenizer is None:
            raise HttpError(400, "the checkpoint has no tokenizer; requests take token ids only")
        return self.tokenizer


def read_tokenize(data: bytes | bytearray, names: tuple[str, ...]) -> tuple[bool, inference_pb2.GenerateRequest]:
    """Returns a request with the body's prompt, and whether the answer names tokens. Raises HttpError."""
    body, _ = read_object(TokenizeBody, data)
    check_model(body.model, names)
    if (body.prompt is None) == (body.messages is None):
        raise HttpError(400, "prompt and messages are there, or neither is; give one of them", param="prompt")
    try:
        return body.return_token_strs, body.request
    except InvalidRequest as error:
        raise HttpError(400, str(error)) from error


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def read_detokenize(data: bytes | bytearray, names: tuple[str, ...]) -> list[int]:
    """Returns the token ids. Raises HttpError."""
    body, _ = read_object(DetokenizeBody, data)
    check_model(body.model, names)
    return body.tokens


def check_model(asked: str | None, names: tuple[str, ...]) -> None:
    """Raises HttpError for another model's name."""
    if asked not in (None, *names):
        raise HttpError.of(UnknownModel(f"model is {asked!r:.80}; {shown(names)} served here"))
