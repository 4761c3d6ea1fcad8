"""Attacks over gRPC: HTTP/2 frames by hand, since libraries would not send them."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.benchmarks.strangers.attacks import Answers, Target, by_name

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
ACK = END_STREAM = 1
END_HEADERS = 4
CANCEL = b"\0\0\0\x08"
INFERENCE = "/tandem.v1.Inference"
HEALTH, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GENERATE, MODEL = f"{INFERENCE}/Generate", f"{INFERENCE}/GetModelInfo"
REQUEST = b"\x1a\x05\x0a\x03\x05\x06\x07\x2a\x02\x08\x01"  # three token ids, one to generate
A_TURN = 500  # calls or frames that are written at once
MANY = 1000  # connections, of an attack with a small part on each
NAMES = {GOAWAY: "goaway", RESET: "reset", HEADERS: "answered"}

Frames = Callable[[int], bytes]
"""Makes the bytes to send for a number, counted from 0."""


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def message(content: bytes = b"") -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


def literal(name: str, value: str) -> bytes:
    """A header that goes into no table (RFC 7541, section 6.2.2)."""
    return b"\0" + b"".join(bytes((len(part),)) + part.encode() for part in (name, value))


def call_headers(path: str, token: str = "") -> bytes:
    """token: none unless given."""
    pairs = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    pairs += [("te", "trailers"), ("content-type", "application/grpc")]
    pairs += [("authorization", f"Bearer {token}")] if token else []
    return b"".join(literal(*pair) for pair in pairs)


@asynccontextmanager
async def connected(
    target: Target, answers: Answers, greeting: bytes = PREFACE + frame(SETTINGS) + frame(SETTINGS, ACK)
) -> AsyncIterator[asyncio.StreamWriter]:
    """A connection whose answers are read, and counted by the kind of their frames."""
    host, _, port = target.grpc.rpartition(":")
    tls = None if target.tls_ca is None else ssl.create_default_context(cafile=target.tls_ca)
    if tls is not None:
        tls.set_alpn_protocols(["h2"])
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    hearing = asyncio.ensure_future(_hear(reader, answers))
    try:
        writer.write(greeting)
        yield writer
    finally:
        hearing.cancel()
        writer.transport.abort()


async def _hear(reader: asyncio.StreamReader, answers: Answers) -> None:
    while True:
        head = await reader.readexactly(9)
        answers[NAMES.get(head[3], "other frames")] += 1
        await reader.readexactly(int.from_bytes(head[:3], "big"))


async def flood(target: Target, answers: Answers, frames: Frames, calls: int = 1 << 20) -> None:
    """Sends frames of one number after another, as fast as they are taken."""
    async with connected(target, answers) as writer:
        for first in range(0, calls, A_TURN):
            writer.write(b"".join(map(frames, range(first, min(first + A_TURN, calls)))))
            await writer.drain()
            await asyncio.sleep(0)


def stream_of(number: int) -> int:
    return 2 * number + 1


def opened(headers: bytes, flags: int = END_HEADERS) -> Frames:
    return lambda number: frame(HEADERS, flags, stream_of(number), headers)


def whole(headers: bytes, content: bytes = b"") -> Frames:
    data = message(content)
    begun = opened(headers)
    return lambda number: begun(number) + frame(DATA, END_STREAM, stream_of(number), data)


def then_reset(frames: Frames) -> Frames:
    return lambda number: frames(number) + frame(RESET, 0, stream_of(number), CANCEL)


async def resets(target: Target, answers: Answers) -> None:
    """50,000 calls a connection, each of which is reset at once."""
    await flood(target, answers, then_reset(opened(call_headers(GENERATE, target.token))), 50_000)


async def resets_of_a_stranger(target: Target, answers: Answers) -> None:
    await flood(target, answers, then_reset(opened(call_headers(GENERATE, "no"))), 50_000)


async def whole_requests_reset(target: Target, answers: Answers) -> None:
    await flood(target, answers, then_reset(whole(call_headers(GENERATE, target.token), REQUEST)), 20_000)


async def empty_calls(target: Target, answers: Answers) -> None:
    """4,500 a connection, whose requests say nothing."""
    await flood(target, answers, whole(call_headers(GENERATE, target.token)), 4_500)


async def calls_of_a_stranger(target: Target, answers: Answers) -> None:
    await flood(target, answers, whole(call_headers(GENERATE, "no"), REQUEST))


async def calls_of_no_method(target: Target, answers: Answers) -> None:
    await flood(target, answers, whole(call_headers("/none/none", target.token)))


async def health_checks(target: Target, answers: Answers) -> None:
    """They need no token."""
    await flood(target, answers, whole(call_headers(HEALTH)))


async def health_watches(target: Target, answers: Answers) -> None:
    await flood(target, answers, whole(call_headers(WATCH)))


async def reflections(target: Target, answers: Answers) -> None:
    await flood(target, answers, whole(call_headers(REFLECTION, "no"), b"\x3a\x00"))


async def unfinished_calls(target: Target, answers: Answers) -> None:
    """2,000 calls a connection, whose requests never come."""
    await _hold(target, answers, opened(call_headers(GENERATE, target.token)), 2_000)


async def half_messages(target: Target, answers: Answers) -> None:
    begun = opened(call_headers(GENERATE, target.token))
    half = message(REQUEST)[:-3]
    await _hold(target, answers, lambda number: begun(number) + frame(DATA, 0, stream_of(number), half), 2_000)


async def _hold(target: Target, answers: Answers, frames: Frames, calls: int) -> None:
    async with connected(target, answers) as writer:
        for number in range(calls):
            writer.write(frames(number))
            await writer.drain()
        await asyncio.sleep(1.0)


async def oversized_messages(target: Target, answers: Answers) -> None:
    """Their heads say 1 GiB."""
    begun, head = opened(call_headers(GENERATE, target.token)), b"\0\x40\0\0\0"
    await flood(target, answers, lambda number: begun(number) + frame(DATA, 0, stream_of(number), head))


async def unread_grpc_answers(target: Target, answers: Answers) -> None:
    """1,000 calls a connection, of a client that lets nobody send it data."""
    no_window = PREFACE + frame(SETTINGS, 0, 0, b"\0\x04\0\0\0\0") + frame(SETTINGS, ACK)
    frames = whole(call_headers(MODEL, target.token))
    async with connected(target, answers, no_window) as writer:
        for number in range(1000):
            writer.write(frames(number))
        await writer.drain()
        await asyncio.sleep(1.0)


def _always(content: bytes) -> Frames:
    return lambda _: content


async def pings(target: Target, answers: Answers) -> None:
    await flood(target, answers, _always(frame(PING, 0, 0, bytes(8))))


async def settings(target: Target, answers: Answers) -> None:
    await flood(target, answers, _always(frame(SETTINGS, 0, 0, b"\0\x03\0\0\0\x64")))


async def window_updates(target: Target, answers: Answers) -> None:
    await flood(target, answers, _always(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\x01")))


async def priorities(target: Target, answers: Answers) -> None:
    await flood(target, answers, lambda number: frame(PRIORITY, 0, stream_of(number), b"\0\0\0\0\x10"))


async def unknown_frames(target: Target, answers: Answers) -> None:
    await flood(target, answers, _always(frame(0xFA)))


async def empty_data(target: Target, answers: Answers) -> None:
    """Sends empty DATA frames of one call that never ends."""
    begun = frame(HEADERS, END_HEADERS, 1, call_headers(GENERATE, target.token))
    await flood(target, answers, lambda number: frame(DATA, 0, 1) if number else begun)


async def continuations(target: Target, answers: Answers) -> None:
    """Sends CONTINUATION frames of headers that never end."""
    begun = frame(HEADERS, 0, 1, call_headers(GENERATE, target.token))
    more = frame(CONTINUATION, 0, 1, literal("x", "y"))
    await flood(target, answers, lambda number: more if number else begun)


async def headers_without_a_path(target: Target, answers: Answers) -> None:
    """They make no calls."""
    headers = literal(":method", "POST") + literal("te", "trailers")
    await flood(target, answers, opened(headers, END_HEADERS | END_STREAM))


async def bad_headers(target: Target, answers: Answers) -> None:
    """They name an entry that no table has."""
    await flood(target, answers, opened(b"\xff\xff\xff\x7f"), 10)


async def http_1(target: Target, answers: Answers) -> None:
    async with connected(target, answers, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n") as writer:
        await writer.drain()
        await asyncio.sleep(0.01)


async def many_grpc_connections(target: Target, answers: Answers) -> None:
    """1,000, with a call on each."""

    call = whole(call_headers(GENERATE, "no"), REQUEST)(0)

    async def one() -> None:
        async with connected(target, answers) as writer:
            writer.write(call)
            await writer.drain()
            await asyncio.sleep(1.0)

    await asyncio.gather(*(one() for _ in range(MANY)), return_exceptions=True)


GRPC_ATTACKS = by_name(
    resets,
    resets_of_a_stranger,
    whole_requests_reset,
    empty_calls,
    calls_of_a_stranger,
    calls_of_no_method,
    health_checks,
    health_watches,
    reflections,
    unfinished_calls,
    half_messages,
    oversized_messages,
    unread_grpc_answers,
    pings,
    settings,
    window_updates,
    priorities,
    unknown_frames,
    empty_data,
    continuations,
    headers_without_a_path,
    bad_headers,
    http_1,
    many_grpc_connections,
)
