"""Attacks over HTTP, on the port of clients and on that of metrics."""

import asyncio
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.benchmarks.strangers.attacks import Answers, Target, by_name

STATUS = re.compile(rb"HTTP/1.1 (\d+)")
COMPLETIONS = "/v1/completions"
JSON = ("content-type: application/json",)
CHUNKED = ("transfer-encoding: chunked",)
ONE_BYTE_CHUNKS = b"1\r\n \r\n" * 50_000
MIB = 1 << 20
HELD = 64  # connections that nobody answers, before the oldest is closed
MANY = 250  # connections at once


class Connection:
    """One of the attacker's. It reads answers while it sends, as honest clients do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answers) -> None:
        self.reader = reader
        self.writer = writer
        self._answers = answers

    async def say(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()
        await asyncio.sleep(0)  # drain() may not wait, and then nothing would be heard

    async def hear(self) -> None:
        """Counts the statuses of all answers until the server closes the connection."""
        while data := await self.reader.read(1 << 16):
            self._answers.update(status.decode() for status in STATUS.findall(data))
        self._answers["closed"] += 1

    async def repeat(self, *contents: bytes) -> None:
        """Says them again and again until the server closes the connection, and hears all answers meanwhile."""
        hearing = asyncio.ensure_future(self.hear())
        try:
            while not hearing.done():
                for content in contents:
                    await self.say(content)
        finally:
            hearing.cancel()


@asynccontextmanager
async def connected(target: Target, answers: Answers, address: str | None = None) -> AsyncIterator[Connection]:
    """A connection to the clients' port, or to another address."""
    host, _, port = (address or target.http).rpartition(":")
    tls = None if target.tls_ca is None else ssl.create_default_context(cafile=target.tls_ca)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    try:
        yield Connection(reader, writer, answers)
    finally:
        writer.transport.abort()


def head(
    target: Target, *headers: str, path: str = COMPLETIONS, method: str = "POST", token: str | None = None
) -> bytes:
    """A request's head. token: the right one unless another is given; empty for none."""
    given = target.token if token is None else token
    lines = (f"{method} {path} HTTP/1.1", "host: localhost", *headers)
    authorization = (f"authorization: Bearer {given}",) if given else ()
    return "\r\n".join((*lines, *authorization, "", "")).encode()


async def one_byte_chunks(target: Target, answers: Answers) -> None:
    """A body of 50,000 chunks, by a client that has a token."""
    async with connected(target, answers) as connection:
        await connection.repeat(head(target, *JSON, *CHUNKED), ONE_BYTE_CHUNKS, b"0\r\n\r\n")


async def one_byte_chunks_of_a_stranger(target: Target, answers: Answers) -> None:
    async with connected(target, answers) as connection:
        await connection.repeat(head(target, *JSON, *CHUNKED, token="no"), ONE_BYTE_CHUNKS, b"0\r\n\r\n")


async def one_byte_chunks_of_a_wrong_type(target: Target, answers: Answers) -> None:
    async with connected(target, answers) as connection:
        await connection.repeat(head(target, "content-type: text/plain", *CHUNKED), ONE_BYTE_CHUNKS, b"0\r\n\r\n")


async def one_byte_chunks_to_metrics(target: Target, answers: Answers) -> None:
    async with connected(target, answers, target.metrics) as connection:
        asked = head(target, *CHUNKED, path="/metrics", token="no")
        await connection.repeat(asked, ONE_BYTE_CHUNKS, b"0\r\n\r\n")


async def endless_one_byte_chunks(target: Target, answers: Answers) -> None:
    """Behind a good head, as long as the server takes them."""
    async with connected(target, answers) as connection:
        await connection.say(head(target, *JSON, *CHUNKED))
        await connection.repeat(ONE_BYTE_CHUNKS)


async def extension_of_spaces(target: Target, answers: Answers) -> None:
    """A chunk extension over which a regular expression can backtrack."""
    async with connected(target, answers) as connection:
        await connection.say(head(target, *JSON, *CHUNKED) + b"1;" + b" " * 60_000 + b"\n\r\n")
        await connection.hear()


async def header_of_spaces(target: Target, answers: Answers) -> None:
    """A header line over which a regular expression can backtrack."""
    async with connected(target, answers) as connection:
        await connection.say(b"GET / HTTP/1.1\r\nhost: localhost\r\na:" + b" " * 16_000 + b"\0\r\n\r\n")
        await connection.hear()


async def many_headers(target: Target, answers: Answers) -> None:
    """40,000 lines of a head that comes at once."""
    async with connected(target, answers) as connection:
        await connection.say(b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a:b\r\n" * 40_000 + b"\r\n")
        await connection.hear()


async def many_trailers(target: Target, answers: Answers) -> None:
    async with connected(target, answers) as connection:
        await connection.say(head(target, *JSON, *CHUNKED) + b"2\r\n{}\r\n0\r\n" + b"a:b\r\n" * 40_000 + b"\r\n")
        await connection.hear()


async def escaped_path(target: Target, answers: Answers) -> None:
    """A path of 4 KiB, all of it escaped."""
    async with connected(target, answers) as connection:
        await connection.repeat(head(target, path="/" + "%41" * 1350, method="GET", token="no"))


async def one_byte_segments(target: Target, answers: Answers) -> None:
    """A good request, each byte of it in a segment of its own."""
    content = b'{"prompt":[5],"max_tokens":1}'
    async with connected(target, answers) as connection:
        await connection.repeat(
            *(bytes([byte]) for byte in head(target, *JSON, f"content-length: {len(content)}")), content
        )


async def pipelined(target: Target, answers: Answers) -> None:
    """10,000 requests at once."""
    async with connected(target, answers) as connection:
        await connection.repeat(head(target, path="/health", method="GET", token="") * 10_000)


async def pipelined_of_a_stranger(target: Target, answers: Answers) -> None:
    """10,000 at once, of which each is refused."""
    async with connected(target, answers) as connection:
        await connection.repeat(head(target, "content-length: 2", *JSON, token="no") * 10_000)


async def unread_answers(target: Target, answers: Answers) -> None:
    """Requests whose answers nobody takes."""
    async with connected(target, answers) as connection:
        while True:
            await connection.say(head(target, path="/v1/models", method="GET") * 1000)


async def refused_uploads(target: Target, answers: Answers) -> None:
    """16 MiB of content behind a head that is refused."""
    async with connected(target, answers) as connection:
        await connection.say(head(target, *JSON, f"content-length: {16 * MIB}", token="no"))
        await connection.repeat(bytes(MIB))


async def expected(target: Target, answers: Answers) -> None:
    """Heads alone, of clients that await leave to send the rest."""
    async with connected(target, answers) as connection:
        await connection.repeat(head(target, *JSON, "content-length: 2", "expect: 100-continue", token="no"))


async def half_closed(target: Target, answers: Answers) -> None:
    async with connected(target, answers) as connection:
        await connection.say(head(target, path="/v1/models", method="GET", token="no"))
        if target.tls_ca is None:
            connection.writer.write_eof()
        await connection.hear()


async def connections(target: Target, answers: Answers) -> None:
    """One after the other, without a word."""
    async with connected(target, answers):
        answers["connected"] += 1


async def many_connections(target: Target, answers: Answers) -> None:
    """Each with a body of one-byte chunks."""
    async with asyncio.TaskGroup() as group:
        for _ in range(MANY):
            group.create_task(one_byte_chunks(target, answers))


async def broken_handshakes(target: Target, answers: Answers) -> None:
    """The beginning of TLS on one connection after another. Each costs the server a signature, if it speaks TLS."""
    host, _, port = target.http.rpartition(":")
    hello, held = client_hello(), deque[asyncio.StreamWriter]()
    try:
        while True:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(hello)
            held.append(writer)
            answers["connected"] += 1
            if len(held) > HELD:
                held.popleft().transport.abort()
    finally:
        for writer in held:
            writer.transport.abort()


def client_hello() -> bytes:
    """Returns a client's first bytes over TLS."""
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


HTTP_ATTACKS = by_name(
    one_byte_chunks,
    one_byte_chunks_of_a_stranger,
    one_byte_chunks_of_a_wrong_type,
    one_byte_chunks_to_metrics,
    endless_one_byte_chunks,
    extension_of_spaces,
    header_of_spaces,
    many_headers,
    many_trailers,
    escaped_path,
    one_byte_segments,
    pipelined,
    pipelined_of_a_stranger,
    unread_answers,
    refused_uploads,
    expected,
    half_closed,
    connections,
    many_connections,
    broken_handshakes,
)
