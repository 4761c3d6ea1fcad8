"""The end of a connection whose client still sends."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

SILENT_SECONDS = 2.0  # without a byte of the client, after which it has read the answer or never will
LINGER_SECONDS = 30.0  # in all
LINGER_BYTES = 64 << 20


class LingeringTransport(asyncio.Transport):
    """A client's transport that ends when the client can have read the last answer.

    The kernel takes an answer back where a connection is closed before all that its client sent was read. So close()
    sends the end of this side. What the client still sends is dropped, unread, for a bounded time.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, still_sends: Callable[[], bool]
    ) -> None:
        """still_sends: whether more of a request may be on its way. Else close() closes the transport."""
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._still_sends = still_sends
        self._ends: float | None = None  # when it ends at the latest, once close() was called
        self._dropped = self._dropped_before = 0

    @property
    def is_closed(self) -> bool:
        """Returns whether it lingers no more, or never did."""
        return self._transport.is_closing()

    def close(self) -> None:
        if self._ends is not None or self.is_closed:
            return
        if not self._still_sends():
            self._transport.close()
            return
        self._ends = self._loop.time() + LINGER_SECONDS
        if self._transport.can_write_eof():  # over TLS the answer's length is the end
            with suppress(OSError):  # the client is gone
                self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(SILENT_SECONDS, self._look)

    def drop(self, size: int) -> None:
        """Counts bytes that have come since close()."""
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._ends is not None or self.is_closed

    def write(self, data: Any) -> None:
        if self._ends is None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        if self._ends is None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def _look(self) -> None:
        if self.is_closed:
            return
        assert self._ends is not None, "it lingers"
        if self._dropped == self._dropped_before or self._loop.time() > self._ends:
            self._transport.abort()
        else:
            self._dropped_before = self._dropped
            self._loop.call_later(SILENT_SECONDS, self._look)
