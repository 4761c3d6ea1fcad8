"""The answer of /v1/chat/completions."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self

from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import encode
from tandem.cluster.frontends.openai.answer import Answer, chat_logprobs, event
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.tool_fields import NamedTool
from tandem.cluster.text.parsers.formats import Left, OutputFormats
from tandem.cluster.text.parsers.output_parser import OutputParser
from tandem.cluster.text.parsers.parts import CallArguments, CallBegin, Content, Part, Reasoning
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2

OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")  # fields of the prompt, which several answers share


class ChatAnswers:
    """Makes the answers of one gateway's chats."""

    def __init__(self, model: str, tokenizer: Tokenizer | None, formats: OutputFormats) -> None:
        """model: the name to answer with. formats: of the checkpoint."""
        self._model = model
        self.tokenizer = tokenizer
        self._formats = formats

    async def make(self, body: AskingBody, requests: list[inference_pb2.GenerateRequest]) -> "ChatAnswer":
        """The answer to a chat. Its request keeps special tokens in the text where some are marks."""
        assert isinstance(body, ChatBody)
        return ChatAnswer(body, self._model, self.tokenizer, await self.reading(body, requests))

    async def reading(
        self, body: ChatBody, requests: list[inference_pb2.GenerateRequest]
    ) -> Callable[[], OutputParser | None]:
        """Makes the parser of each of a chat's answers. HttpError where the checkpoint's tool calls are not known."""
        calls, formats = body.calls, self._formats
        if calls is not None and not calls.forced and not formats.takes_tools:
            raise HttpError(
                400,
                "tools: the chat template shows no format of tool calls that is known here, and gateway.tool_parser "
                "names none; tool_choice 'required', 'none' or a named function is accepted",
                param="tools",
            )
        keeps_special = False
        if formats.needs_special_tokens(calls):
            for request in requests:
                sampling = request.sampling
                keeps_special = sampling.HasField("skip_special_tokens") and not sampling.skip_special_tokens
                sampling.skip_special_tokens = False
        (request,) = requests
        reasoning = await asyncio.to_thread(formats.reasoning, request.chat, body.template_kwargs, begins=body.begins)
        if request.sampling.HasField("guided"):
            reasoning = formats.think_before(request.sampling.guided, reasoning, body.most_tokens)
        return partial(formats.parser, calls, opened=reasoning == Left.OPEN, keep_special=keeps_special)


class ChatAnswer(Answer):
    """To POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, body: ChatBody, model: str, tokenizer: Tokenizer | None, parser: Callable[[], OutputParser | None]
    ) -> None:
        """parser: makes that of one answer; None for text that is content as it stands."""
        super().__init__(body, model, tokenizer)
        self._chat = body
        self._make_parser = parser
        self._parser: OutputParser | None = None
        self._begun = False

    def __copy__(self) -> Self:
        """For one of several answers, which has a parser of its own."""
        other = type(self)(self._chat, self._model, self._texts, self._make_parser)
        other._created = self._created
        other._parser = self._make_parser()
        return other

    def events(self, message: inference_pb2.GenerateResponse) -> str:
        if self._parser is None:
            return super().events(message)
        self._count(message)
        chunk = self._chunk(message)
        (choice,) = chunk["choices"]
        says = any(choice.get(name) for name in ("delta", "finish_reason", "logprobs", "token_ids"))
        return event(encode(chunk)) if says or not chunk.keys().isdisjoint(OF_PROMPT) else ""

    def _object(self, kind: str, request_id: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chat has one prompt. What is told of it stands beside the choices, as in vLLM."""
        told = [{name: choice.pop(name) for name in OF_PROMPT if name in choice} for choice in choices]
        return super()._object(kind, request_id, choices) | (told[0] if told else {})

    def _content(self, message: inference_pb2.GenerateResponse, is_chunk: bool) -> dict[str, Any]:
        if not is_chunk:
            return {"message": {"role": "assistant", "refusal": None, **self._said(message, is_chunk)}}
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return {"delta": role | self._said(message, is_chunk)}

    def _said(self, message: inference_pb2.GenerateResponse, is_chunk: bool) -> dict[str, Any]:
        parser = self._parser
        if parser is None:
            return {"content": message.text}
        parts = parser.push(message.text)
        if message.finish_reason or not is_chunk:
            parts += parser.finish(cut=message.finish_reason == inference_pb2.FINISH_REASON_LENGTH)
        return _joined(parts, self._chat, is_chunk)

    def _finish_reason(self, message: inference_pb2.GenerateResponse) -> str | None:
        """As OpenAI has it: a function that was named is no news to the client."""
        reason = super()._finish_reason(message)
        called = self._parser is not None and self._parser.num_calls > 0
        named = isinstance(self._chat.tool_choice, NamedTool)
        return "tool_calls" if reason == "stop" and called and not named else reason

    def _logprobs(self, tokens: Iterable[inference_pb2.TokenLogprobs]) -> dict[str, Any]:
        by_id = self._body.return_tokens_as_token_ids
        return {"content": chat_logprobs(tokens, self._texts, by_id=by_id), "refusal": None}


def _joined(parts: list[Part], body: ChatBody, is_chunk: bool) -> dict[str, Any]:
    """The fields of a message, or of a delta, that have these parts."""
    said: dict[str, Any] = {} if is_chunk else {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                said["content"] = (said.get("content") or "") + text
            case Reasoning(text):
                if body.include_reasoning:
                    said["reasoning_content"] = said.get("reasoning_content", "") + text
            case CallBegin(index, call_id, name):
                calls[index] = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        said["tool_calls"] = [{"index": index, **call} if is_chunk else call for index, call in calls.items()]
    elif not is_chunk and said["content"] is None and "reasoning_content" not in said:
        said["content"] = ""
    return said
