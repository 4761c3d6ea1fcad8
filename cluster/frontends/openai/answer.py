"""The gateway's messages as objects of OpenAI's API."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Self

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.frontends.http.json_blocks import JsonList, encode, json_blocks
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
        encoded = b"".join(json_blocks(chunk)).decode()
        before, _, rest = encoded.partition(encode(BLANK))  # the quotes of names in it would be escaped
        between, empty, behind = rest.partition(NO_TOKEN_IDS)
        return cls(before, between + empty[:-1], empty[-1:] + behind, has_token_ids=bool(empty))

    def chunk(self, message: inference_pb2.GenerateResponse) -> str:
        token_ids = ",".join(map(str, message.token_ids)) if self.has_token_ids else ""
        return f"{self.before}{encode(message.text)}{self.between}{token_ids}{self.behind}"


class AnyAnswer(ABC):
    """One answer of any API, which takes its messages in order: events of a stream, or a choice of the whole.

    What it makes may have JsonLists and arrays, see json_blocks(). A copy is another answer, which has seen no message.
    """

    @abstractmethod
    def keep(self, message: inference_pb2.GenerateResponse) -> None:
        """Keeps one message, for the next event or for the choice."""

    @abstractmethod
    def events(self, message: inference_pb2.GenerateResponse) -> Iterable[bytes]:
        """Returns one message of a stream, and what was kept before, as server-sent events in blocks; perhaps none."""

    @abstractmethod
    def end(self, request_id: str, usage: inference_pb2.Usage) -> Iterable[bytes]:
        """Returns the events after the last message of a stream. Of several answers only the first is asked."""

    @abstractmethod
    def choice(self) -> dict[str, Any]:
        """Returns the choice from all that was kept."""

    @abstractmethod
    def whole(self, request_id: str, choices: list[dict[str, Any]], usage: inference_pb2.Usage) -> dict[str, Any]:
        """Returns the whole answer to a call. Of several answers only the first is asked."""


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
        self._begin()

    def __copy__(self) -> Self:
        kind = type(self)
        other = kind.__new__(kind)
        vars(other).update(vars(self))
        other._begin()
        return other

    def _begin(self) -> None:
        """Sets what messages change."""
        self._frame: Frame | None = None  # of the chunks between the first and the last one
        self._prompt_tokens = self._output_tokens = 0  # so far, where chunks tell them
        self._last = inference_pb2.GenerateResponse()  # message that was kept
        self._token_ids, self._prompt_logprobs = JsonList(), JsonList()  # of no chunk yet
        self._prompt_ids: Int64Array | None = None

    def keep(self, message: inference_pb2.GenerateResponse) -> None:
        body = self._body
        self._last = message
        self._count(message)
        if body.return_token_ids:
            self._token_ids.extend(list(message.token_ids))
        if body.return_token_ids and message.prompt_token_bytes:
            self._prompt_ids = prompt_from_bytes(message.prompt_token_bytes)
        if body.prompt_logprobs is not None and message.prompt_logprobs:
            self._prompt_logprobs.extend(self._prompt_entries(message.prompt_logprobs))
        self._keep_content(message)
        if body.num_logprobs is not None:
            self._keep_logprobs(message.logprobs)

    def events(self, message: inference_pb2.GenerateResponse) -> Iterable[bytes]:
        if message.finish_reason or self._body.num_logprobs is not None or self._body.tells_usage:
            self.keep(message)
            return event_blocks(self._chunk())
        if self._frame is not None:
            return (event(self._frame.chunk(message)),)
        self.keep(message)
        first = self._chunk()
        self.keep(inference_pb2.GenerateResponse(request_id=message.request_id, index=message.index, text=BLANK))
        self._frame = Frame.of(self._chunk())
        return event_blocks(first)

    def end(self, request_id: str, usage: inference_pb2.Usage) -> Iterable[bytes]:
        last: Iterable[bytes] = ()
        if self._body.includes_usage:
            last = event_blocks(self._object(self.chunk_object, request_id, []) | {"usage": _usage(usage)})
        return chain(last, (event("[DONE]"),))

    def _count(self, message: inference_pb2.GenerateResponse) -> None:
        if self._body.tells_usage:
            self._prompt_tokens += len(message.prompt_token_bytes) // PROMPT_DTYPE.itemsize
            self._output_tokens += len(message.token_ids)

    def _chunk(self) -> dict[str, Any]:
        """Makes a chunk of what was kept since the chunk before."""
        usage: dict[str, Any] = {"usage": None} if self._body.includes_usage else {}
        if self._body.tells_usage:
            usage = {"usage": _counts(self._prompt_tokens, self._output_tokens)}
        return self._object(self.chunk_object, self._last.request_id, [self._choice(is_chunk=True)]) | usage

    def choice(self) -> dict[str, Any]:
        return self._choice(is_chunk=False)

    def whole(self, request_id: str, choices: list[dict[str, Any]], usage: inference_pb2.Usage) -> dict[str, Any]:
        return self._object(self.whole_object, request_id, choices) | {"usage": _usage(usage)}

    def _object(self, kind: str, request_id: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"{self.prefix}-{request_id}"
        return {"id": name, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _choice(self, is_chunk: bool) -> dict[str, Any]:
        choice = {
            "index": self._last.index,
            **self._take_content(is_chunk),
            "logprobs": None if self._body.num_logprobs is None else self._take_logprobs(),
            "finish_reason": self._finish_reason(),
            "stop_reason": _stop_reason(self._last),
        }
        if self._body.return_token_ids:
            choice["token_ids"], self._token_ids = self._token_ids, JsonList()
        if self._prompt_ids is not None:
            choice["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        if self._body.prompt_logprobs is not None and (self._prompt_logprobs or not is_chunk):
            choice["prompt_logprobs"], self._prompt_logprobs = self._prompt_logprobs, JsonList()
        return choice

    def _prompt_entries(self, tokens: Iterable[inference_pb2.TokenLogprobs]) -> list[dict[str, Any] | None]:
        """Returns entries as vLLM does: null for the first token, then each by its id, with the likeliest tokens."""
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

    def _finish_reason(self) -> str | None:
        return FINISH_REASONS.get(self._last.finish_reason)

    @abstractmethod
    def _keep_content(self, message: inference_pb2.GenerateResponse) -> None: ...

    @abstractmethod
    def _take_content(self, is_chunk: bool) -> dict[str, Any]:
        """Returns the fields of a choice that hold the text of a chunk or of a whole answer."""

    @abstractmethod
    def _keep_logprobs(self, tokens: Sequence[inference_pb2.TokenLogprobs]) -> None: ...

    @abstractmethod
    def _take_logprobs(self) -> dict[str, Any]: ...


def event(data: str) -> bytes:
    """Makes a server-sent event with one line of data."""
    return f"data: {data}\n\n".encode()


def event_blocks(data: dict[str, Any], name: str = "") -> Iterator[bytes]:
    """Makes the server-sent event of an object, which may be large, in blocks. name: of the event, if it has one."""
    return json_blocks(data, (f"event: {name}\ndata: " if name else "data: ").encode(), b"\n\n")


def token_name(token_id: int, tokenizer: Tokenizer | None, part: str = "") -> str:
    """Returns a token's text, or its id if tokenizer is None. Bytes of a part of a character are escaped and follow
    `part`, so that unlike tokens have unlike names."""
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
    """Returns each token with the likeliest tokens in its place, as chats give them. by_id: ids name tokens, as without
    a tokenizer."""

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
    if usage.host_cached_tokens:
        tiers = {"host_cached_tokens": usage.host_cached_tokens, "disk_cached_tokens": usage.disk_cached_tokens}
        counts |= {"x-tandem": {tier: tokens for tier, tokens in tiers.items() if tokens}}
    if usage.drafted_tokens:
        rejected = usage.drafted_tokens - usage.accepted_tokens
        details = {"accepted_prediction_tokens": usage.accepted_tokens, "rejected_prediction_tokens": rejected}
        counts |= {"completion_tokens_details": details}
    return counts


def _counts(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    total = prompt_tokens + output_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens, "total_tokens": total}
