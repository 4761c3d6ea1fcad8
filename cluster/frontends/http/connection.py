"""One client's HTTP connection: what it may send, and how long it may take."""

import asyncio
import re
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.cluster.frontends.http.backlog import Backlog
from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.lingering import LingeringTransport
from tandem.cluster.frontends.http.reply import BODY_BYTES, encode
from tandem.cluster.frontends.http.strict_http import MOST_HEAD, StrictHttp
from tandem.cluster.requests.call_limit import connections_per_frontend

IDLE_SECONDS = 60.0  # from a new connection, or an answer, to the end of the next request's head
LOOK_SECONDS = 0.5  # between looks whether a client that has sent its last byte still reads
MOST_EVENTS = 32  # of one connection in a turn of the event loop; h11 takes 10 us for each
FRAMING_PIECE, CONTENT_PIECE = 128, 1 << 18  # bytes that h11 gets at a time, of framing or of content alone
END_OF_HEAD = re.compile(rb"\n\r?\n")


class Flow(FlowControl):
    """uvicorn's flow control, for a connection that has received bytes left to parse."""

    def __init__(self, transport: asyncio.Transport, go_on: Callable[[], None]) -> None:
        super().__init__(transport)
        self._go_on = go_on

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._go_on()


class Connection(H11Protocol):
    """One client's connection, which ends when idle. uvicorn would wait for a request's head without bound, and would
    not answer a client that has closed its own side.

    h11 gets what the client sends in pieces: a head, framing, or content. In one turn of the event loop it parses
    MOST_EVENTS, and the rest waits in the backlog. Meanwhile the connection is not read.
    """

    conn: StrictHttp
    _half_closed = False  # the client sends no more, and may still read
    _look: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, backlog: Backlog, **options: Any) -> None:
        """Takes uvicorn's arguments. backlog: of all connections of a server."""
        super().__init__(*arguments, **options)
        self.conn = StrictHttp(h11.SERVER, MOST_HEAD)
        self._backlog = backlog
        self._waits = False  # in the backlog
        self._unread = bytearray()  # what h11 has not got
        self._searched = 0  # bytes of _unread in which no head ends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream's"
        super().connection_made(transport)
        self.transport = self._lingering = LingeringTransport(transport, self.loop, self._still_sends)
        self.flow = Flow(self.transport, self._go_on)
        self.idle_since: float | None = None
        self._become_idle()
        if len(self.connections) > connections_per_frontend():
            self._end_the_longest_idle()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._lingering.drop(len(data))
            return
        self._unread += data
        if not self._waits:
            self._parse()

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            self.scope.get("state", {})[BODY_BYTES] = self.conn.body_bytes
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_of_idleness.cancel()
            self.idle_since = None

    def on_response_complete(self) -> None:
        self._become_idle()
        super().on_response_complete()
        self._go_on()  # with the next request, if that is there
        if self._half_closed and not self._is_asked_in_full:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_idleness.cancel()
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn returns None, asyncio takes either
        """Hears that the client has closed its side. Requests that have come in full are answered. TLS has no closed
        sides."""
        if self.scheme != "http" or not self._is_asked_in_full:
            return False
        if not self._half_closed:
            self._half_closed = True
            self._look_for_client()
        return True

    def send_400_response(self, msg: str) -> None:
        """Ends a connection whose client does not speak HTTP, with the reason if an answer can still begin."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = encode(HttpError(400, self.conn.refusal).body).encode()
            headers = [("content-type", "application/json"), ("content-length", str(len(content)))]
            for part in (
                h11.Response(status_code=400, headers=[*headers, ("connection", "close")], reason=b"Bad Request"),
                h11.Data(data=content),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(part) or b"")
        self.idle_since = self.loop.time()
        self.transport.close()

    def shutdown(self) -> None:
        """Ends the connection once no request waits for an answer: the server stops."""
        if self.transport.is_closing():
            self.transport.abort()
        else:
            super().shutdown()

    def _parse(self) -> None:
        """Parses what one turn of the event loop has time for."""
        self._waits = False
        self.conn.events = 0
        while self.conn.events < MOST_EVENTS and self._is_parsed_on and (piece := self._piece()):
            super().data_received(piece)
        self._go_on()

    def _go_on(self) -> None:
        """Reads on, or waits with what is there."""
        if self.transport.is_closing():
            self._unread.clear()
        elif self._unread and self._searched < len(self._unread):
            self.transport.pause_reading()
            if self._is_parsed_on and not self._waits:
                self._waits = True
                self._backlog.add(self._parse)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    @property
    def _is_parsed_on(self) -> bool:
        """Returns whether bytes can be parsed now. A request waits until the one before is answered."""
        parses = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        return bool(self._unread) and parses and not self.flow.read_paused and not self.transport.is_closing()

    def _piece(self) -> bytes:
        """The bytes that h11 gets next: a whole head, or some of a body. Empty while a head is not whole."""
        if self.conn.their_state is h11.IDLE:
            end = END_OF_HEAD.search(self._unread, max(0, self._searched - 2), MOST_HEAD)
            if end is None and len(self._unread) <= MOST_HEAD and self._unread[0] > ord(" "):
                self._searched = len(self._unread)
                return b""
            size = MOST_HEAD + 1 if end is None else end.end()
        else:
            size = min(self.conn.content_left, CONTENT_PIECE) or FRAMING_PIECE
        piece = bytes(self._unread[:size])
        del self._unread[:size]
        self._searched = 0
        return piece

    def _still_sends(self) -> bool:
        """Returns whether more of a request may come, or has come and is not read."""
        state = self.conn.their_state
        return self.conn.is_broken or state is h11.SEND_BODY or (bool(self._unread) and state is not h11.IDLE)

    @property
    def _is_asked_in_full(self) -> bool:
        """Returns whether a request has come with its whole body and is not answered."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _look_for_client(self) -> None:
        """Sends what clients skip, until the answer ends: one that is gone resets its connection then."""
        if self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version != b"1.0":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        elif self.conn.our_state is h11.SEND_BODY and self.conn.sends_events:
            self.transport.write(self.conn.send(h11.Data(data=b":\n\n")) or b"")
        if not self.transport.is_closing():
            self._look = self.loop.call_later(LOOK_SECONDS, self._look_for_client)

    def _become_idle(self) -> None:
        self.idle_since = self.loop.time()
        self._end_of_idleness = self.loop.call_later(IDLE_SECONDS, self.transport.close)

    def _end_the_longest_idle(self) -> None:
        """Ends the connection that is idle longest, perhaps this one, unless enough end already. Strangers must not
        keep others out."""
        there = [one for one in self.connections if isinstance(one, Connection) and not one._lingering.is_closed]
        idle = [one for one in there if one.idle_since is not None]
        if idle and len(there) > connections_per_frontend():
            min(idle, key=lambda one: one.idle_since or 0.0).transport.abort()
