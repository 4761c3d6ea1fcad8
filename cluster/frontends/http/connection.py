"""One client's HTTP connection: what it may send, and how long it may take."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.http.reply import EVENTS, encode
from tandem.cluster.requests.call_limit import connections_per_frontend

IDLE_SECONDS = 60.0  # from a new connection, or an answer, to the end of the next request's head
LOOK_SECONDS = 0.5  # between looks whether a client that has sent its last byte still reads
LENGTH, CODING = b"content-length", b"transfer-encoding"


class StrictHttp(h11.Connection):
    """Takes no request whose end two readers could see at two places (RFC 9112, 6.1): a proxy may be one of them."""

    refusal = "the request is not HTTP/1.1"
    sends_events = False  # whether the answer is a stream of events

    def next_event(self) -> Any:
        """As h11's. RemoteProtocolError, also for what h11 would take; `refusal` then says what was wrong."""
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                names = {name for name, _ in event.headers}
                if {LENGTH, CODING} <= names:
                    raise h11.RemoteProtocolError("content-length and transfer-encoding: one of them is accepted")
                if CODING in names and event.http_version < b"1.1":
                    raise h11.RemoteProtocolError("transfer-encoding is accepted from HTTP/1.1 on")
        except h11.RemoteProtocolError as error:
            self.refusal = str(error)
            raise
        return event

    def send(self, event: h11.Event) -> Any:
        if isinstance(event, h11.Response):
            self.sends_events = EVENTS.encode() in dict(event.headers).values()
        return super().send(event)


class Connection(H11Protocol):
    """One client's connection, which ends when idle. uvicorn would wait for a request's head without bound, and would
    not answer a client that has closed its own side."""

    _half_closed = False  # the client sends no more, and may still read
    _look: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """As uvicorn's."""
        super().__init__(*arguments, **options)
        self.conn = StrictHttp(h11.SERVER)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream's"
        super().connection_made(transport)
        self.idle_since: float | None = None
        self._become_idle()
        if len(self.connections) > connections_per_frontend():
            self._end_the_longest_idle()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_of_idleness.cancel()
            self.idle_since = None

    def on_response_complete(self) -> None:
        self._become_idle()
        super().on_response_complete()  # which begins with the next request, if that is there
        if self._half_closed and not self._is_asked_in_full:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_idleness.cancel()
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn returns None, asyncio takes either
        """The client has closed its side. What it has asked in full is answered. TLS has no closed sides."""
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
        self.transport.close()

    @property
    def _is_asked_in_full(self) -> bool:
        """Whether a request without an answer is there with its body."""
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
        """Ends one, perhaps this one, unless enough end already: strangers must not keep others out."""
        there = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        idle = [one for one in there if one.idle_since is not None]
        if idle and len(there) > connections_per_frontend():
            min(idle, key=lambda one: one.idle_since or 0.0).transport.abort()
