"""Python values of the gateway's responses, and errors of failed calls, for both clients."""

import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from tandem.cluster.errors import (
    CallError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unavailable,
)
from tandem.cluster.errors.statuses import RETRY_AFTER_KEY, error_of
from tandem.cluster.protocol import CLIENT_ID_KEY, CLUSTER_ENDS
from tandem.proto import admin_pb2, inference_pb2

MAX_CLIENT_ID = 128
TIMED_OUT = "Deadline Exceeded"  # gRPC's text, without the time
TOO_LARGE = "Received message larger than max"  # gRPC's text, too
LONGEST_CALL = 366 * 86400.0  # seconds; gRPC treats much longer timeouts as none
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each client: the gateway's processes share connections
    ("grpc.initial_reconnect_backoff_ms", 100),  # a gateway that is started again is back within a second
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# With several gateways a gateway whose host fell silent counts as gone, even if no connection was closed.
SEVERAL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),  # as many as it takes: a client sends nothing while it reads a stream
    ("grpc.min_reconnect_backoff_ms", 5000),  # the longest that a connection may take to open
)
UNTAKEN = "CANCELLED"  # the whole text for a call that a stopping server had not yet looked at


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
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of these
    host_cached_tokens: int = 0  # of cached_tokens: copied back from host memory
    disk_cached_tokens: int = 0  # of host_cached_tokens: read from a disk before


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
    expected_first_token_seconds: float = 0.0
    moves: int = 0


@dataclass(frozen=True)
class GenerateUpdate:
    """The tokens and text that one message adds."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None  # None until the answer's last message, then stop, length, abort or error
    logprobs: tuple[TokenLogprobs, ...]
    usage: Usage | None  # with the last message of all
    timings: Timings | None  # with the answer's last message
    index: int = 0  # of the answer, less than n
    stop_reason: str | int | None = None  # the stop string or the id in stop_token_ids that ended the answer
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # before the first token; None for the prompt's first one
    prompt_token_ids: tuple[int, ...] = ()  # with the first message, if they were asked for


def split_addresses(address: str | Sequence[str]) -> list[str]:
    """Splits one or several HOST:PORT. ConfigError if there is none."""
    given = address.split(",") if isinstance(address, str) else [*address]
    found = [one.strip() for one in given]
    if not all(found) or not found:
        raise ConfigError(f"address is {address!r:.200}; it must be HOST:PORT, or several with commas between")
    return found


def is_gone(error: grpc.RpcError) -> bool:
    """Returns whether the error shows that the gateway is gone, or is about to go."""
    kind = error_of(error)
    return kind is Unavailable or (kind is Cancelled and error.details() == UNTAKEN)


def client_metadata(client_id: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a client's requests. ConfigError for an id that gRPC cannot carry."""
    own = uuid.uuid4().hex if client_id is None else client_id
    if not (1 <= len(own) <= MAX_CLIENT_ID and own.isascii() and own.isprintable()):
        raise ConfigError(f"client_id is {own!r:.80}; it must be 1 to {MAX_CLIENT_ID} printable ASCII characters")
    return ((CLIENT_ID_KEY, own),)


def update(message: inference_pb2.GenerateResponse) -> GenerateUpdate:
    reason = inference_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_").lower()
    stop = message.WhichOneof("stop_reason")
    return GenerateUpdate(
        request_id=message.request_id,
        token_ids=tuple(message.token_ids),
        text=message.text,
        finish_reason=reason if message.finish_reason else None,
        logprobs=tuple(map(_token_logprobs, message.logprobs)),
        usage=Usage(**fields_of(message.usage)) if message.HasField("usage") else None,
        timings=Timings(**fields_of(message.timings)) if message.HasField("timings") else None,
        prompt_logprobs=tuple(
            _token_logprobs(token) if token.HasField("chosen") else None for token in message.prompt_logprobs
        ),
        index=message.index,
        stop_reason=None if stop is None else getattr(message, stop),
        prompt_token_ids=struct.unpack(f"<{len(message.prompt_token_bytes) // 4}I", message.prompt_token_bytes),
    )


def _token_logprobs(token: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    top = tuple((other.token_id, other.logprob) for other in token.top)
    return TokenLogprobs(token.chosen.token_id, token.chosen.logprob, top)


def scale_request(
    island: str, num_prefill: int | None, num_decode: int | None, num_islands: int | None
) -> admin_pb2.ScaleRequest:
    """Raises InvalidRequest."""
    numbers = {"num_prefill": num_prefill, "num_decode": num_decode, "num_islands": num_islands}
    try:
        return admin_pb2.ScaleRequest(island=island, **numbers)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name} {number!r}" for name, number in numbers.items())
        raise InvalidRequest(
            f"island is {island!r}, {given}: {error}; they must be a name and integers in [0, 2^32)"
        ) from None


def adapter_request(name: str, path: str, *, load_inplace: bool) -> admin_pb2.AddAdapterRequest:
    """Raises InvalidRequest."""
    try:
        return admin_pb2.AddAdapterRequest(name=name, path=path, load_inplace=load_inplace)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"name is {name!r:.80}, path is {path!r:.80}: {error}; both must be text") from None


def call_error(address: str, error: grpc.RpcError, request: Message, timeout: float) -> CallError:
    """The typed error of a failed call, to be raised `from None`. timeout: of the whole call, in seconds."""
    kind, details = error_of(error), error.details() or ""
    if kind is DeadlineExceeded and TIMED_OUT in details:
        details += f"; the timeout of {request.DESCRIPTOR.name.removesuffix('Request')} was {timeout:g} s"
    if kind is Unavailable and not details.startswith(CLUSTER_ENDS):  # the connection says so
        return Unavailable(f"{address}: no gateway answers there: {details}")
    if kind is Overloaded and TOO_LARGE in details:
        return InvalidRequest(f"the request is larger than gateway.max_message_mib allows: {details}")
    if issubclass(kind, Overloaded):
        advice = retry_advice(error)
        return kind(f"{address}: {details}", 1.0 if advice is None else advice)
    if kind is ServerError:
        details = f"{error.code().name}: {details}"
    return kind(details if kind is InvalidRequest else f"{address}: {details}")


def retry_advice(error: grpc.RpcError) -> float | None:
    """Returns the seconds after which the gateway wants the call again. Only calls that it has not begun have such an
    advice."""
    metadata: Any = error.trailing_metadata() or ()
    advised = str(dict(metadata).get(RETRY_AFTER_KEY, ""))
    return int(advised) / 1000 if advised.isdecimal() else None


def fields_of(message: Any) -> dict[str, Any]:
    """Returns all fields of a message, by name."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
