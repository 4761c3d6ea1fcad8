"""One answer over HTTP, by ASGI's messages."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from tandem.cluster.errors.limit_state import LimitState
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.json_blocks import BLOCK_BYTES, encode, json_blocks

EVENTS = "text/event-stream; charset=utf-8"
BODY_BYTES = "body_bytes"
"""The key in a scope's state for how many bytes of the body have come, with the framing of its chunks."""
LAST_SECONDS = 60.0  # for a client to read the end of its answer, and more for a long one:
LEAST_BYTES_A_SECOND = 1 << 16

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ErrorForm:
    """An error in the form of OpenAI's API."""

    def body(self, error: HttpError) -> dict[str, Any]:
        """The JSON of an error that is the whole answer."""
        return error.body

    def headers(self, limits: Sequence[LimitState]) -> dict[str, str]:
        """Returns the headers that show what is left of a key's limits."""
        return {
            f"x-ratelimit-{name}-{one.unit}": value
            for one in limits
            for name, value in (
                ("limit", str(one.limit)),
                ("remaining", str(one.remaining)),
                ("reset", f"{one.reset_seconds:.3f}s"),
            )
        }

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
        self._within = False  # an event that is partly sent

    async def whole(self, status: int, value: object, headers: Mapping[str, str] | None = None) -> None:
        """Sends a JSON value, see json_blocks(). Other tasks go on between two blocks of it. Raises TimeoutError if the
        client does not read LEAST_BYTES_A_SECOND."""
        blocks: list[bytes] = []
        for block in json_blocks(value):
            if blocks:
                await asyncio.sleep(0)
            blocks.append(block)
        await self._send_all(status, blocks, "application/json", headers)

    async def content(
        self, status: int, content: bytes, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends all of an answer. TimeoutError as whole()."""
        begins = range(0, len(content), BLOCK_BYTES)
        blocks = [content] if len(begins) < 2 else [content[begin : begin + BLOCK_BYTES] for begin in begins]
        await self._send_all(status, blocks, media_type, headers)

    async def _send_all(
        self, status: int, blocks: list[bytes], media_type: str, headers: Mapping[str, str] | None
    ) -> None:
        async with asyncio.timeout(LAST_SECONDS) as limit:
            size = str(sum(map(len, blocks)))
            await self._begin(status, media_type, {"content-length": size, **(headers or {})})
            self._ended = True  # no error can follow
            await self._write_last(blocks, limit)

    async def events(self, blocks: Iterable[bytes]) -> None:
        """Sends server-sent events. Waits without bound for a client that does not read. Without a block there is
        nothing to send."""
        for block in blocks:
            if not self._begun:
                # The headers keep proxies from holding events back.
                await self._begin(200, EVENTS, {"cache-control": "no-cache", "x-accel-buffering": "no"})
            if self._within:
                await asyncio.sleep(0)
            self._within = True
            await self._write(block)
        self._within = False

    async def end(self, blocks: Iterable[bytes]) -> None:
        """Sends the last events of a stream. TimeoutError as whole()."""
        async with asyncio.timeout(LAST_SECONDS) as limit:
            await self._write_last(blocks, limit)

    async def error(self, error: HttpError) -> None:
        """Sends an error. In a stream that has begun it is the last event."""
        with suppress(TimeoutError):
            if not self._begun:
                headers = {**self._form.headers(error.limits), **error.headers}
                await self.whole(error.status, self._form.body(error), headers)
            elif not self._ended:
                self._ended = True
                async with asyncio.timeout(1):
                    event = self._form.event(error)
                    await self._write((f"\n\n{event}" if self._within else event).encode(), last=True)

    async def _begin(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        self._begun = True
        pairs = {"content-type": media_type, **self.headers, **headers}.items()
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write_last(self, blocks: Iterable[bytes], limit: asyncio.Timeout) -> None:
        """Sends the rest of an answer. The limit moves with what the client has read."""
        held = b""
        for block in blocks:
            if held:
                await self._write(held)
                limit.reschedule((limit.when() or 0.0) + len(held) / LEAST_BYTES_A_SECOND)
                await asyncio.sleep(0)  # a connection that takes all of it would hold the event loop
            held = block
        self._ended = True
        await self._write(held, last=True)

    async def _write(self, content: bytes, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": content, "more_body": not last})
