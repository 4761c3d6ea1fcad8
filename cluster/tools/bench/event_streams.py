"""HTTP connections to one server, and their server-sent events. The only user of h11.

A library for all of HTTP takes several times the processor time for each event, and the load generator must not be what
is measured.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from urllib.parse import urlsplit

import h11

from tandem.cluster.errors import UsageError
from tandem.cluster.tools.bench.targets import Refused

EVENT_END = b"\n\n"
DATA = b"data:"
MOST_BODY = 64 << 20  # bytes that have gathered: of an event, or of an answer without events
IDLE_SECONDS = 2.0  # after which a server may be about to close a connection: many do after 5
SHOWN = 300  # bytes of an answer that an error shows

OnEvent = Callable[[bytes], None]


class HttpConnections:
    """A pool of connections to one server, as many as there ever were calls at a time. For one event loop."""

    def __init__(self, url: str, token: str | None) -> None:
        """url: http or https, with or without a path."""
        try:
            parts = urlsplit(url.rstrip("/"))
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise UsageError(f"--url is {url!r:.80}: {error}; it must be like http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url is {url!r:.80}; it must be like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._path = parts.path.removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = [("host", parts.netloc.rpartition("@")[2]), ("accept", "*/*")]
        if token is not None:
            self._headers.append(("authorization", f"Bearer {token}"))
        self._all: set[_Connection] = set()
        self._idle: deque[_Connection] = deque()

    async def call(self, method: str, path: str, body: bytes, on_event: OnEvent | None) -> bytes:
        """Makes one call to its end. Each event's data goes to on_event as it comes; other answers are returned.

        Raises Refused for a status other than 200, for a connection that breaks, and as on_event does.
        """
        headers = [*self._headers, ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "application/json"))
        request = h11.Request(method=method, target=self._path + path, headers=headers)
        try:
            connection = await self._connection()
            answer = await connection.ask(request, body, on_event)
        except OSError as error:
            raise Refused(f"{self._host}:{self._port}: {error}") from None
        if connection.reusable:
            self._idle.append(connection)
        return answer

    async def aclose(self) -> None:
        for connection in self._all:
            connection.close()
        await asyncio.gather(*(connection.lost.wait() for connection in self._all))

    async def _connection(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost.is_set() and loop.time() < connection.idle_since + IDLE_SECONDS:
                return connection
            connection.close()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        self._all = {one for one in self._all if not one.lost.is_set()} | {connection}
        return connection


class _Connection(asyncio.Protocol):
    """A connection with one call at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream's"
        self._transport = transport
        self._http = h11.Connection(h11.CLIENT)
        self._answer: asyncio.Future[bytes] | None = None
        self.lost = asyncio.Event()
        self.reusable = False
        self.idle_since = 0.0

    async def ask(self, request: h11.Request, body: bytes, on_event: OnEvent | None) -> bytes:
        """Makes a call. Cancelling it closes the connection, which ends the request at the server."""
        self._answer = asyncio.get_running_loop().create_future()
        self._status, self._body, self._on_event = 0, bytearray(), on_event
        self.reusable = False
        head = self._http.send(request) or b""
        self._transport.write(head + (self._http.send(h11.Data(data=body)) or b""))
        self._transport.write(self._http.send(h11.EndOfMessage()) or b"")
        try:
            return await self._answer
        finally:
            if not self.reusable:
                self.close()

    def eof_received(self) -> None:
        self.data_received(b"")  # the end of an answer that names no length

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # nothing was asked
            return
        try:
            self._http.receive_data(data)
            while self._take(self._http.next_event()):
                pass
        except (Refused, ValueError, KeyError, TypeError) as error:
            self._fail(error if isinstance(error, Refused) else Refused(f"an event that is none: {error!r:.200}"))
        except h11.RemoteProtocolError as error:
            self._fail(Refused(f"no HTTP: {error}"))

    def _take(self, event: object) -> bool:
        """Takes in an event. Returns whether there may be more."""
        if isinstance(event, h11.Response):
            self._status = event.status_code
        elif isinstance(event, h11.Data):
            self._body += event.data
            if len(self._body) > MOST_BODY:
                raise Refused(f"an answer of more than {MOST_BODY} bytes")
            if self._status == 200 and self._on_event is not None:
                self._events(self._on_event)
        elif isinstance(event, h11.EndOfMessage):
            self._end()
            return False
        return event is not h11.NEED_DATA and event is not h11.PAUSED and not isinstance(event, h11.ConnectionClosed)

    def _events(self, on_event: OnEvent) -> None:
        if b"\r" in self._body:
            self._body = self._body.replace(b"\r\n", b"\n")
        *events, rest = self._body.split(EVENT_END)
        self._body = rest
        for event in events:
            if event.startswith(DATA):
                on_event(bytes(event[len(DATA) :]).strip())

    def _end(self) -> None:
        assert self._answer is not None
        if self._status != 200:
            raise Refused(f"status {self._status}: {bytes(self._body[:SHOWN])!r}")
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
            self.reusable = True
            self.idle_since = asyncio.get_running_loop().time()
        self._answer.set_result(bytes(self._body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()
        self._fail(Refused("the server closed the connection before the answer ended"))

    def close(self) -> None:
        self._transport.abort()

    def _fail(self, error: Refused) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
