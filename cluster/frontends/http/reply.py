"""One answer over HTTP, by ASGI's messages."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from tandem.cluster.frontends.http.errors import HttpError

# In ASCII: some clients take other characters of a text, U+2028 say, for the end of a line.
encode = json.JSONEncoder(separators=(",", ":")).encode
"""JSON as the HTTP frontend writes it: no spaces, no line ends."""

EVENTS = "text/event-stream; charset=utf-8"
BODY_BYTES = "body_bytes"
"""In a scope's state: how many bytes of the body have come, with the framing of its chunks."""
LAST_SECONDS = 60.0  # for a client to read the end of its answer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ErrorForm:
    """An error in the form of OpenAI's API."""

    def body(self, error: HttpError) -> dict[str, Any]:
        """The JSON of an error that is the whole answer."""
        return error.body

    def event(self, error: HttpError) -> str:
        """The last event of a stream that fails."""
        return f"data: {encode(self.body(error))}\n\n"


class Reply:
    """The answer to one call: a JSON object, or server-sent events. An error may replace the rest."""

    def __init__(self, send: Send, form: ErrorForm | None = None) -> None:
        """form: of errors; None: OpenAI's."""
        self._send = send
        self.headers: dict[str, str] = {}  # of whatever is answered
        self._form = form or ErrorForm()
        self._begun = self._ended = False

    async def whole(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
        """Sends a JSON value. TimeoutError when the client does not read."""
        await self.content(status, encode(value).encode(), "application/json", headers)

    async def content(
        self, status: int, content: bytes, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends all of an answer. TimeoutError as whole()."""
        async with asyncio.timeout(LAST_SECONDS):
            await self._begin(status, media_type, {"content-length": str(len(content)), **(headers or {})})
            await self._write(content, last=True)

    async def events(self, text: str) -> None:
        """Sends server-sent events. Waits without bound for a client that does not read."""
        if not self._begun:
            # The headers keep proxies from holding events back.
            await self._begin(200, EVENTS, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        await self._write(text.encode())

    async def end(self, text: str) -> None:
        """Sends the last events of a stream. TimeoutError as whole()."""
        async with asyncio.timeout(LAST_SECONDS):
            await self._write(text.encode(), last=True)

    async def error(self, error: HttpError) -> None:
        """Sends an error. In a stream that has begun it is the last event."""
        with suppress(TimeoutError):
            if not self._begun:
                await self.whole(error.status, self._form.body(error), error.headers)
            elif not self._ended:
                async with asyncio.timeout(1):
                    await self._write(self._form.event(error).encode(), last=True)

    async def _begin(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        self._begun = True
        pairs = {"content-type": media_type, **self.headers, **headers}.items()
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, content: bytes, last: bool = False) -> None:
        self._ended = last
        await self._send({"type": "http.response.body", "body": content, "more_body": not last})
