"""What both clients share: requests from Python values, Python values from responses, errors from status codes."""

import difflib
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tandem.cluster.errors import (
    AttemptsExhausted,
    CallError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ScaleRefused,
    ServerError,
    Unauthenticated,
    Unavailable,
)
from tandem.proto import admin_pb2, inference_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

RETRY_AFTER_KEY = "retry-after-ms"
CLIENT_ID_KEY = "client-id"
MAX_CLIENT_ID = 128
TIMED_OUT = "Deadline Exceeded"  # gRPC's own words, which do not say after how long
TOO_LARGE = "Received message larger than max"  # gRPC's, too
ACCEPTED = MappingProxyType(
    {
        FieldDescriptor.TYPE_UINT32: "an integer in [0, 2^32)",
        FieldDescriptor.TYPE_INT32: "an integer in [-2^31, 2^31)",
        FieldDescriptor.TYPE_UINT64: "an integer in [0, 2^64)",
        FieldDescriptor.TYPE_FLOAT: "a number",
        FieldDescriptor.TYPE_BOOL: "true or false",
        FieldDescriptor.TYPE_STRING: "Unicode text",
    }
)
LONGEST_CALL = 366 * 86400.0  # seconds; gRPC takes much longer ones for none
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a gateway that is started again is back within a second
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Sampling(TypedDict, total=False):
    """Sampling parameters by vLLM's names; inference.proto has the defaults."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    logprobs: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of the chosen token, and the most likely ones as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds as inference.proto defines them, bytes of KV pushed, pages held on the decode worker."""

    queue_seconds: float
    prefill_seconds: float
    push_seconds: float
    first_token_seconds: float
    bytes_pushed: int
    total_seconds: float
    pages: int
    attempts: int


@dataclass(frozen=True)
class GenerateUpdate:
    """The tokens and text that one message adds.

    finish_reason is None while running, else stop, length, abort or error; usage and timings come with the last one.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...]
    usage: Usage | None
    timings: Timings | None


def build_request(prompt: Prompt, sampling: Mapping[str, Any], request_id: str | None) -> inference_pb2.GenerateRequest:
    """prompt: text, token ids, or chat messages with role and content. Raises InvalidRequest."""
    request = inference_pb2.GenerateRequest()
    try:
        request.request_id = request_id or ""
    except (TypeError, ValueError):
        raise InvalidRequest(f"request_id is {request_id!r:.80}; it must be Unicode text") from None
    _set_prompt(request, prompt)
    known = inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    for name, value in sampling.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InvalidRequest(f"unknown sampling parameter {name!r}; {hint}known: {', '.join(known)}")
        one: Any = [value] if name == "stop" and isinstance(value, str) else value
        try:
            request.sampling.MergeFrom(inference_pb2.SamplingParams(**{name: one}))
        except (TypeError, ValueError):
            which = "each" if known[name].is_repeated else "it"
            accepted = ACCEPTED[known[name].type]
            raise InvalidRequest(f"sampling.{name} is {value!r:.80}; {which} must be {accepted}") from None
    return request


def client_metadata(client_id: str | None) -> tuple[tuple[str, str], ...]:
    """What each request of a client carries. ConfigError for an id that gRPC cannot carry."""
    own = uuid.uuid4().hex if client_id is None else client_id
    if not (1 <= len(own) <= MAX_CLIENT_ID and own.isascii() and own.isprintable()):
        raise ConfigError(f"client_id is {own!r:.80}; 1 to {MAX_CLIENT_ID} printable ASCII characters are accepted")
    return ((CLIENT_ID_KEY, own),)


def update(message: inference_pb2.GenerateResponse) -> GenerateUpdate:
    reason = inference_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
    return GenerateUpdate(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=reason if message.finish_reason else None,
        logprobs=tuple(
            TokenLogprobs(
                token.chosen.token_id,
                token.chosen.logprob,
                tuple((other.token_id, other.logprob) for other in token.top),
            )
            for token in message.logprobs
        ),
        usage=Usage(**_fields(message.usage)) if message.HasField("usage") else None,
        timings=Timings(**_fields(message.timings)) if message.HasField("timings") else None,
    )


def scale_request(island: str, num_prefill: int | None, num_decode: int | None) -> admin_pb2.ScaleRequest:
    """Raises InvalidRequest."""
    try:
        return admin_pb2.ScaleRequest(island=island, num_prefill=num_prefill, num_decode=num_decode)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"island is {island!r}, num_prefill {num_prefill!r}, num_decode {num_decode!r}: {error}; a name and "
            "integers in [0, 2^32) are accepted"
        ) from None


def call_error(address: str, error: grpc.RpcError, request: Message, timeout: float) -> CallError:
    """The typed error for a failed call, to be raised `from None`. timeout: seconds that the whole call had."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.DEADLINE_EXCEEDED and TIMED_OUT in details:
        details += f"; the timeout of {request.DESCRIPTOR.name.removesuffix('Request')} was {timeout:g} s"
    if code == grpc.StatusCode.UNAVAILABLE:  # the connection's word, never the gateway's
        return Unavailable(f"{address}: no gateway answers there: {details}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in details:
        return InvalidRequest(f"the request is larger than gateway.max_message_mib allows: {details}")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(f"{address}: {details}", retry_after_seconds(error))
    kinds: dict[grpc.StatusCode, type[CallError]] = {
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
        grpc.StatusCode.CANCELLED: Cancelled,
        grpc.StatusCode.ABORTED: AttemptsExhausted,
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.FAILED_PRECONDITION: ScaleRefused,
    }
    if code in kinds:
        return kinds[code](details if code == grpc.StatusCode.INVALID_ARGUMENT else f"{address}: {details}")
    return ServerError(f"{address}: {code.name}: {details}")


def retry_after_seconds(error: grpc.RpcError) -> float:
    """Of a RESOURCE_EXHAUSTED: what the gateway's trailing metadata advises; 1 where it says nothing."""
    metadata: Any = error.trailing_metadata() or ()
    advised = str(dict(metadata).get(RETRY_AFTER_KEY, ""))
    return int(advised) / 1000 if advised.isdecimal() else 1.0


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    items: Any = prompt
    try:
        if isinstance(items, str):
            request.text = items
        elif len(items) and isinstance(items[0], Mapping):
            request.chat.messages.extend(inference_pb2.ChatMessage(**turn) for turn in items)
        else:
            request.token_bytes = struct.pack(f"<{len(items)}I", *items)
    except (TypeError, ValueError, KeyError, struct.error) as error:
        raise InvalidRequest(
            f"prompt is {items!r:.80}: {error}; "
            "Unicode text, token ids in [0, 2^32) or a list of chat messages are accepted"
        ) from None


def _fields(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
