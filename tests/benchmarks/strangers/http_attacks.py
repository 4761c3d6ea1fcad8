"""Attacks over HTTP, on the port of clients and on that of metrics."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.benchmarks.strangers.attacks import Answers, Target, by_name

COMPLETIONS = "/v1/completions"
JSON = ("content-type: application/json",)
CHUNKED = ("transfer-encoding: chunked",)
ONE_BYTE_CHUNKS = b"1\r\n \r\n" * 50_000
MANY = 1000  # connections, of an attack with a small part on each


class Connection:
    """One of the attacker's. It reads answers while it sends, as honest clients do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: Answers) -> None:
        self.reader = reader
        self.writer = writer
        self._answers = answers

    async def say(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def hear(self) -> None:
        """Counts the statuses of all answers until the server closes the connection."""
        while data := await self.reader.read(1 << 16):
            for part in data.split(b"HTTP/1.1 ")[1:]:
                self._answers[part[:3].decode(errors="replace")] += 1
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


async def pipelined(target: Target, answers: Answers) -> None:
    """10,000 requests at once."""
    async with connected(target, answers) as connection:
        await connection.repeat(head(target, path="/health", method="GET", token="") * 10_000)


HTTP_ATTACKS = by_name(
    one_byte_chunks,
    one_byte_chunks_of_a_stranger,
    one_byte_chunks_of_a_wrong_type,
    one_byte_chunks_to_metrics,
    endless_one_byte_chunks,
    pipelined,
)
