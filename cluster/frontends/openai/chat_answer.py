"""The answer of /v1/chat/completions."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import StringIO
from typing import Any

from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.json_blocks import JsonList
from tandem.cluster.frontends.openai.answer import Answer, chat_logprobs, event_blocks
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.chats import ChatBody
from tandem.cluster.frontends.openai.tool_fields import NamedTool
from tandem.cluster.text.parsers.formats import Left, OutputFormats
from tandem.cluster.text.parsers.output_parser import OutputParser
from tandem.cluster.text.parsers.parts import CallArguments, CallBegin, Content, ParsedPart, Reasoning
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2

OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")  # fields of the prompt, which several answers share


class ChatAnswers:
    """Makes the answers of one gateway's chats."""

    def __init__(self, tokenizer: Tokenizer | None, formats: OutputFormats) -> None:
        """formats: of the checkpoint."""
        self.tokenizer = tokenizer
        self._formats = formats

    async def make(self, model: str, body: AskingBody, requests: list[inference_pb2.GenerateRequest]) -> "ChatAnswer":
        """Makes the answer to a chat. model: the name to answer with. Its request keeps special tokens in the text if
        some are marks."""
        assert isinstance(body, ChatBody)
        return ChatAnswer(body, model, self.tokenizer, await self.reading(body, requests))

    async def reading(
        self, body: ChatBody, requests: list[inference_pb2.GenerateRequest]
    ) -> Callable[[], OutputParser | None]:
        """Makes the parser of each of a chat's answers. Raises HttpError if the checkpoint's tool calls are not
        known."""
        calls, formats = body.calls, self._formats
        if calls is not None and not calls.forced and not formats.takes_tools:
            raise HttpError(
                400,
                "tools: the chat template shows no format of tool calls that is known here, and gateway.tool_parser "
                "names none; set tool_choice to 'required', 'none' or a named function",
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
    """The answer to POST /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, body: ChatBody, model: str, tokenizer: Tokenizer | None, parser: Callable[[], OutputParser | None]
    ) -> None:
        """parser: makes the parser of one answer; None if all text is content."""
        self._chat = body
        self._make_parser = parser
        super().__init__(body, model, tokenizer)

    def _begin(self) -> None:
        super()._begin()
        self._begun = False
        self._parser = self._make_parser()
        self._said = Said(self._chat)  # in no chunk yet
        self._logprobs = JsonList()  # the same

    def events(self, message: inference_pb2.GenerateResponse) -> Iterable[bytes]:
        if self._parser is None:
            return super().events(message)
        self.keep(message)
        chunk = self._chunk()
        (choice,) = chunk["choices"]
        says = any(choice.get(name) for name in ("delta", "finish_reason", "logprobs", "token_ids"))
        return event_blocks(chunk) if says or not chunk.keys().isdisjoint(OF_PROMPT) else ()

    def _object(self, kind: str, request_id: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the object. A chat has one prompt, whose fields stand beside the choices, as in vLLM."""
        told = [{name: choice.pop(name) for name in OF_PROMPT if name in choice} for choice in choices]
        return super()._object(kind, request_id, choices) | (told[0] if told else {})

    def _keep_content(self, message: inference_pb2.GenerateResponse) -> None:
        parser = self._parser
        if parser is None:
            self._said.add([Content(message.text)])
            return
        parts = parser.push(message.text)
        if message.finish_reason:
            parts += parser.finish(cut=message.finish_reason == inference_pb2.FINISH_REASON_LENGTH)
        self._said.add(parts)

    def _take_content(self, is_chunk: bool) -> dict[str, Any]:
        said, self._said = self._said, Said(self._chat)
        if not is_chunk:
            return {"message": {"role": "assistant", "refusal": None, **said.message()}}
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        return {"delta": role | said.delta()}

    def _finish_reason(self) -> str | None:
        """Returns OpenAI's finish reason: a function that was named is no news to the client."""
        reason = super()._finish_reason()
        called = self._parser is not None and self._parser.num_calls > 0
        named = isinstance(self._chat.tool_choice, NamedTool)
        return "tool_calls" if reason == "stop" and called and not named else reason

    def _keep_logprobs(self, tokens: Sequence[inference_pb2.TokenLogprobs]) -> None:
        by_id = self._body.return_tokens_as_token_ids
        self._logprobs.extend(chat_logprobs(tokens, self._texts, by_id=by_id))

    def _take_logprobs(self) -> dict[str, Any]:
        taken, self._logprobs = self._logprobs, JsonList()
        return {"content": taken, "refusal": None}


class Said:
    """The parts of a message, or of a delta, as they come."""

    def __init__(self, body: ChatBody) -> None:
        self._reasons = body.include_reasoning
        self._content: StringIO | None = None
        self._reasoning: StringIO | None = None
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, parts: list[ParsedPart]) -> None:
        """Adds more parts, in order."""
        for part in parts:
            match part:
                case Content(text):
                    self._content = self._content or StringIO(newline="")
                    self._content.write(text)
                case Reasoning(text):
                    if self._reasons:
                        self._reasoning = self._reasoning or StringIO(newline="")
                        self._reasoning.write(text)
                case CallBegin(index, call_id, name):
                    self._calls[index] = {"id": call_id, "type": "function", "function": {"name": name}}
                case CallArguments(index, text):
                    self._calls.setdefault(index, {"function": {}})
                    self._arguments.setdefault(index, []).append(text)

    def delta(self) -> dict[str, Any]:
        """Returns the fields of a delta."""
        said: dict[str, Any] = {}
        if self._content is not None:
            said["content"] = self._content.getvalue()
        if self._reasoning is not None:
            said["reasoning_content"] = self._reasoning.getvalue()
        if self._calls:
            said["tool_calls"] = [{"index": index, **self._call(index)} for index in self._calls]
        return said

    def message(self) -> dict[str, Any]:
        """Returns the fields of a message."""
        said = {"content": None, **self.delta()}
        if self._calls:
            said["tool_calls"] = [self._call(index) for index in self._calls]
        elif said["content"] is None and "reasoning_content" not in said:
            said["content"] = ""
        return said

    def _call(self, index: int) -> dict[str, Any]:
        call = self._calls[index]
        return {**call, "function": {**call["function"], "arguments": "".join(self._arguments.get(index, ()))}}
