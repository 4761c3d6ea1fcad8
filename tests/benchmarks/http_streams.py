"""A client of the HTTP door that costs little: one parser for the one kind of answer that benchmarks ask for."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from itertools import repeat
from typing import Self

PATH = "/v1/completions"
EVENT = b"data: "
LAST = b"[DONE]"
REFUSED = re.compile(rb"HTTP/1.1 (?!200 )\d")  # such an answer has no events
END_OF_BODY = b"0\r\n\r\n"


class HttpStreams:
    """Streams of one HTTP door, each on a connection of its own while it lasts. A context, of one event loop."""

    def __init__(self, address: str) -> None:
        """address: HOST:PORT."""
        self._address = address
        self._all: list[_Connection] = []
        self._idle: list[_Connection] = []

    async def arrivals(self, prompt: Sequence[int], count: int, seconds: float) -> list[float]:
        """Runs a completion of `count` tokens to its end; of each token, when it came, by time.perf_counter().

        Raises TimeoutError after so many seconds, and ValueError with an answer that is no stream.
        """
        wanted = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        body = json.dumps({"prompt": list(prompt), **wanted}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: {self._address}\r\ncontent-type: application/json\r\n"
        request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
        async with asyncio.timeout(seconds):
            connection = self._idle.pop() if self._idle else await self._connect()
            arrivals = await connection.ask(request)
        self._idle.append(connection)
        return arrivals

    async def _connect(self) -> "_Connection":
        host, _, port = self._address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, host.strip("[]"), int(port))
        self._all.append(connection)
        return connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in self._all:
            connection.close()
        await asyncio.gather(*(connection.lost.wait() for connection in self._all))


class _Connection(asyncio.Protocol):
    """One answer at a time. Each event is whole in one chunk of the body, which nothing else of it is split at."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream's"
        self._transport = transport
        self._answer: asyncio.Future[list[float]] | None = None
        self.lost = asyncio.Event()

    async def ask(self, request: bytes) -> list[float]:
        self._answer = asyncio.get_running_loop().create_future()
        self._arrivals: list[float] = []
        self._rest, self._done = b"", False
        self._transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        try:
            if REFUSED.match(self._rest):
                raise ValueError(f"the door answers {self._rest!r:.200}")
            for event in events:
                self._take(event, now)
        except ValueError as error:
            self._fail(error)
        if self._done and self._rest.endswith(END_OF_BODY) and self._answer is not None and not self._answer.done():
            self._answer.set_result(self._arrivals)

    def _take(self, event: bytes, now: float) -> None:
        """event: what stands before the empty line behind it, with the answer's head or a chunk's ahead of it."""
        content = event.partition(EVENT)[2]
        self._done = content == LAST
        if not self._done:
            held = json.loads(content)
            if "error" in held:
                raise ValueError(f"the stream ends with {held['error']}")
            self._arrivals += repeat(now, len(held["choices"][0]["token_ids"]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._fail(ConnectionError("the door closed the connection before the stream ended"))

    def close(self) -> None:
        self._transport.close()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
