"""The gateway's messages as objects of OpenAI's API."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tandem.cluster.frontends.http.reply import encode
from tandem.cluster.frontends.openai.generation_body import GenerationBody
from tandem.cluster.text.tokenizer import Tokenizer
from tandem.proto import inference_pb2
from tandem.workers.wire.messages import PROMPT_DTYPE, prompt_from_bytes

FINISH_REASONS = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}
LEAST_LOGPROB = -9999.0  # JSON has no infinity; the API's own word for "very unlikely"
BLANK = "\0"
NO_TOKEN_IDS = '"token_ids":[]'


@dataclass(frozen=True)
class Frame:
    """The common JSON of one stream's chunks: before the text, and before and behind the token ids."""

    before: str
    between: str
    behind: str
    has_token_ids: bool

    @classmethod
    def of(cls, chunk: dict[str, Any]) -> Self:
        """chunk: one whose text is BLANK and whose token_ids, if it has any, are empty."""
        before, _, rest = encode(chunk).partition(encode(BLANK))  # the quotes of names in it would be escaped
        between, empty, behind = rest.partition(NO_TOKEN_IDS)
        return cls(before, between + empty[:-1], empty[-1:] + behind, has_token_ids=bool(empty))

    def chunk(self, message: inference_pb2.GenerateResponse) -> str:
        token_ids = ",".join(map(str, message.token_ids)) if self.has_token_ids else ""
        return f"{self.before}{encode(message.text)}{self.between}{token_ids}{self.behind}"


class AnyAnswer(ABC):
    """One answer of any API, in the order of its messages: events of a stream, or a choice of the whole."""

    @abstractmethod
    def events(self, message: inference_pb2.GenerateResponse) -> str:
        """One message of a stream, as server-sent events; empty for none."""

    @abstractmethod
    def end(self, request_id: str, usage: inference_pb2.Usage) -> str:
        """The events behind the last message of a stream. Of several answers it is asked of the first."""

    @abstractmethod
    def choice(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """The answer of all its messages, merged into one."""

    @abstractmethod
    def whole(self, request_id: str, choices: list[dict[str, Any]], usage: inference_pb2.Usage) -> dict[str, Any]:
        """All that is answered to a call. Of several answers it is asked of the first."""


class Answer(AnyAnswer):
    """The objects of one answer, in the order of its messages: chunks of a stream, or a choice of the whole."""

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, body: GenerationBody, model: str, tokenizer: Tokenizer | None) -> None:
        """model: the name to answer with. Without a tokenizer tokens are named by their ids."""
        self._body = body
        self._model = model
        self._texts = tokenizer
        self._tokenizer = None if body.return_tokens_as_token_ids else tokenizer
        self._created = int(time.time())
        self._frame: Frame | None = None  # of the chunks between the first and the last one
        self._prompt_tokens = self._output_tokens = 0  # so far, where chunks tell them

    def events(self, message: inference_pb2.GenerateResponse) -> str:
        self._count(message)
        return event(self.chunk(message))

    def end(self, request_id: str, usage: inference_pb2.Usage) -> str:
        last = ""
        if self._body.includes_usage:
            last = event(encode(self._object(self.chunk_object, request_id, []) | {"usage": _usage(usage)}))
        return last + event("[DONE]")

    def chunk(self, message: inference_pb2.GenerateResponse) -> str:
        """One message of a stream, in JSON."""
        if message.finish_reason or self._body.num_logprobs is not None or self._body.tells_usage:
            return encode(self._chunk(message))
        if self._frame is not None:
            return self._frame.chunk(message)
        first = encode(self._chunk(message))
        blank = inference_pb2.GenerateResponse(request_id=message.request_id, index=message.index, text=BLANK)
        self._frame = Frame.of(self._chunk(blank))
        return first

    def _count(self, message: inference_pb2.GenerateResponse) -> None:
        if self._body.tells_usage:
            self._prompt_tokens += len(message.prompt_token_bytes) // PROMPT_DTYPE.itemsize
            self._output_tokens += len(message.token_ids)

    def _chunk(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._body.includes_usage else {}
        if self._body.tells_usage:
            usage = {"usage": _counts(self._prompt_tokens, self._output_tokens)}
        return self._object(self.chunk_object, message.request_id, [self._choice(message, is_chunk=True)]) | usage

    def choice(self, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        return self._choice(message, is_chunk=False)

    def whole(self, request_id: str, choices: list[dict[str, Any]], usage: inference_pb2.Usage) -> dict[str, Any]:
        return self._object(self.whole_object, request_id, choices) | {"usage": _usage(usage)}

    def _object(self, kind: str, request_id: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"{self.prefix}-{request_id}"
        return {"id": name, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _choice(self, message: inference_pb2.GenerateResponse, is_chunk: bool) -> dict[str, Any]:
        choice = {
            "index": message.index,
            **self._content(message, is_chunk),
            "logprobs": None if self._body.num_logprobs is None else self._logprobs(message.logprobs),
            "finish_reason": self._finish_reason(message),
            "stop_reason": _stop_reason(message),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(message.token_ids)
        if self._body.return_token_ids and message.prompt_token_bytes:
            choice["prompt_token_ids"] = prompt_from_bytes(message.prompt_token_bytes).tolist()
        if self._body.prompt_logprobs is not None and (message.prompt_logprobs or not is_chunk):
            choice["prompt_logprobs"] = self._prompt_logprobs(message.prompt_logprobs)
        return choice

    def _prompt_logprobs(self, tokens: Iterable[inference_pb2.TokenLogprobs]) -> list[dict[str, Any] | None]:
        """As vLLM gives them: null for the first token, then each one by its id, with the likeliest beside it."""
        entries: list[dict[str, Any] | None] = []
        most = self._body.prompt_logprobs or 0
        for token in tokens:
            ranked = {other.token_id: rank for rank, other in enumerate(token.top, 1)}
            shown = (token.chosen, *token.top[:most])
            entry = {
                str(one.token_id): {
                    "logprob": logprob_value(one),
                    "rank": ranked.get(one.token_id),
                    "decoded_token": self._decoded(one.token_id),
                }
                for one in shown
            }
            entries.append(entry if token.HasField("chosen") else None)
        return entries

    def _decoded(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def _finish_reason(self, message: inference_pb2.GenerateResponse) -> str | None:
        return FINISH_REASONS.get(message.finish_reason)

    @abstractmethod
    def _content(self, message: inference_pb2.GenerateResponse, is_chunk: bool) -> dict[str, Any]:
        """The fields of a choice that hold the text of a chunk or of a whole answer."""

    @abstractmethod
    def _logprobs(self, tokens: Iterable[inference_pb2.TokenLogprobs]) -> dict[str, Any]: ...


def event(data: str) -> str:
    """A server-sent event of one line of data."""
    return f"data: {data}\n\n"


def token_name(token_id: int, tokenizer: Tokenizer | None, part: str = "") -> str:
    """Its text. The bytes of a part of a character are escaped, behind `part`, so that unlike tokens have unlike names.
    tokenizer None: its id."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return part + data.decode(errors="backslashreplace")


def chat_logprobs(
    tokens: Iterable[inference_pb2.TokenLogprobs], tokenizer: Tokenizer | None, *, by_id: bool = False
) -> list[dict[str, Any]]:
    """Each token with those likeliest in its place, as chats give them. by_id: ids name them, as without a
    tokenizer."""

    def entry(token: inference_pb2.TokenLogprob) -> dict[str, Any]:
        """bytes: the token's own, also of a part of a character; null without a tokenizer."""
        text = token_name(token.token_id, None if by_id else tokenizer)
        own = None if tokenizer is None else list(tokenizer.token_bytes(token.token_id))
        return {"token": text, "logprob": logprob_value(token), "bytes": own}

    return [entry(token.chosen) | {"top_logprobs": [entry(other) for other in token.top]} for token in tokens]


def logprob_value(token: inference_pb2.TokenLogprob) -> float:
    return max(token.logprob, LEAST_LOGPROB)


def _stop_reason(message: inference_pb2.GenerateResponse) -> str | int | None:
    kind = message.WhichOneof("stop_reason")
    return None if kind is None else getattr(message, kind)


def _usage(usage: inference_pb2.Usage) -> dict[str, Any]:
    counts = _counts(usage.prompt_tokens, usage.output_tokens)
    counts |= {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}
    if usage.drafted_tokens:
        rejected = usage.drafted_tokens - usage.accepted_tokens
        details = {"accepted_prediction_tokens": usage.accepted_tokens, "rejected_prediction_tokens": rejected}
        counts |= {"completion_tokens_details": details}
    return counts


def _counts(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    total = prompt_tokens + output_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens, "total_tokens": total}
