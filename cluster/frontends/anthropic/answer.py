"""The answer of /v1/messages: blocks of content, and the events that build them."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain
from math import ceil
from typing import Any, Self

from pydantic_core import from_json

from tandem.cluster.errors.limit_state import LimitState
from tandem.cluster.frontends.anthropic.body import MessagesBody
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.json_blocks import encode
from tandem.cluster.frontends.http.reply import ErrorForm
from tandem.cluster.frontends.openai.asking_body import AskingBody
from tandem.cluster.frontends.openai.chat_answer import ChatAnswers
from tandem.cluster.frontends.openai.translated_answer import Event, TranslatedAnswer
from tandem.cluster.text.parsers.output_parser import OutputParser
from tandem.cluster.text.parsers.parts import CallArguments, CallBegin, Content, ParsedPart, Reasoning
from tandem.proto import inference_pb2
from tandem.workers.wire.messages import PROMPT_DTYPE

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def messages_answer(
    chats: ChatAnswers, model: str, body: AskingBody, requests: list[inference_pb2.GenerateRequest]
) -> "MessagesAnswer":
    """Makes the answer to a body. model: the name to answer with. Raises HttpError as for a chat."""
    assert isinstance(body, MessagesBody)
    return MessagesAnswer(model, await chats.reading(body.chat, requests))


class MessagesAnswer(TranslatedAnswer):
    """The answer to POST /v1/messages."""

    def __init__(self, model: str, parser: Callable[[], OutputParser | None]) -> None:
        """parser: as for ChatAnswer."""
        super().__init__(parser)
        self._model = model
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the last block
        self._open = False

    def __copy__(self) -> Self:
        """Makes a second answer, which has seen no message."""
        return type(self)(self._model, self._make_parser)

    def end(self, request_id: str, usage: inference_pb2.Usage) -> Iterable[bytes]:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": _usage(usage)}
        return chain(self._named(delta), self._named({"type": "message_stop"}))

    def whole(self, request_id: str, choices: list[dict[str, Any]], usage: inference_pb2.Usage) -> dict[str, Any]:
        return self._message(request_id, self._blocks, usage) | self._stop()

    def _message(self, request_id: str, content: list[dict[str, Any]], usage: inference_pb2.Usage) -> dict[str, Any]:
        return {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _stop(self) -> dict[str, Any]:
        stopped = self._last.WhichOneof("stop_reason") == "stop_string"
        reason = "stop_sequence" if stopped else "end_turn"
        if self._last.finish_reason == inference_pb2.FINISH_REASON_LENGTH:
            reason = "max_tokens"
        elif self._parser is not None and self._parser.num_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": self._last.stop_string if stopped else None}

    def _begin_events(self, message: inference_pb2.GenerateResponse) -> list[Event]:
        """Returns the first events. They count the whole prompt: the last events say how much of it was cached."""
        prompt = inference_pb2.Usage(prompt_tokens=len(message.prompt_token_bytes) // PROMPT_DTYPE.itemsize)
        return [{"type": "message_start", "message": self._message(message.request_id, [], prompt)}]

    def _part_events(self, part: ParsedPart) -> list[Event]:
        match part:
            case Reasoning(text):
                begun = self._begin({"type": "thinking", "thinking": "", "signature": ""})
                return [*begun, self._more({"type": "thinking_delta", "thinking": text}, text)]
            case Content(text):
                begun = self._begin({"type": "text", "text": ""})
                return [*begun, self._more({"type": "text_delta", "text": text}, text)]
            case CallBegin(_, call_id, name):
                ended = self._end_events()
                return ended + self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                return [self._more({"type": "input_json_delta", "partial_json": text}, text)]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        """Returns the events that end the last block and begin one of this type; none while such a block is open."""
        if self._open and self._blocks[-1]["type"] == block["type"]:
            return []
        events = self._end_events()
        self._open = True
        self._blocks.append(block)
        index = len(self._blocks) - 1
        return [*events, {"type": "content_block_start", "index": index, "content_block": {**block}}]

    def _more(self, delta: Event, text: str) -> Event:
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end_events(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        block, text = self._blocks[-1], "".join(self._texts)
        self._texts = []
        if block["type"] == "tool_use":
            block["input"] = _object(text)
        else:
            block[block["type"]] = text
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


class MessagesErrors(ErrorForm):
    """Errors in the form of Anthropic's API."""

    def body(self, error: HttpError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}

    def headers(self, limits: Sequence[LimitState]) -> dict[str, str]:
        now = datetime.now(UTC)
        return {
            f"anthropic-ratelimit-{one.unit}-{name}": value
            for one in limits
            for name, value in (
                ("limit", str(one.limit)),
                ("remaining", str(one.remaining)),
                ("reset", f"{now + timedelta(seconds=ceil(one.reset_seconds)):%Y-%m-%dT%H:%M:%SZ}"),
            )
        }

    def event(self, error: HttpError) -> str:
        return f"event: error\ndata: {encode(self.body(error))}\n\n"


def _usage(usage: inference_pb2.Usage) -> dict[str, int]:
    """Returns the usage. Cached prompt tokens are counted apart here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }


def _object(text: str) -> dict[str, Any]:
    """Returns a call's arguments. If max_tokens has cut them off, returns what came, with the beginning of the last
    text."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = _begun(text)
    return value if isinstance(value, dict) else {}


def _begun(text: str) -> Any:
    try:
        return from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return None
