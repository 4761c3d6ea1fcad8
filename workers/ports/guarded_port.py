"""The port of a gRPC server that strangers reach. Clients' bytes pass through here, on the server's event loop.

gRPC itself listens on a PrivateSocket. It takes a connection from here for each client, under a name with the client's
address. What clients send is passed on frame by frame, by turns (CallTurns) and within bounds. What gRPC answers is
passed on as it comes. TLS ends here.
"""

import asyncio
import secrets
import select
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio

from tandem.workers.ports.allowance import Allowance
from tandem.workers.ports.call_turns import CallTurns, Rest
from tandem.workers.ports.client_frames import ClientFrames, NotHttp2
from tandem.workers.ports.listener import ACCEPTED, QUEUED, SILENT_SECONDS, listener
from tandem.workers.ports.private_socket import PrivateSocket

SMALL_FRAMES = (5_000, 10_000)  # a second, and at once; of a connection: pings, resets, window updates, empty data
RESETS = (200, 1_000)  # as above, of calls
HELD_BYTES = 1 << 17  # of a client, before it is read no further
RETRY_SECONDS = 0.01  # where gRPC is slow to take connections


class GuardedPort:
    """Made before its server starts, opened afterwards. Owned by the event loop."""

    def __init__(self, server: grpc.aio.Server, turns: CallTurns, most: int) -> None:
        """turns: hears of each call that the server looks at. most: connections at a time."""
        self.turns = turns
        self._most = most
        self._relays: set[_Client] = set()
        self._names = f"\0tandem-{secrets.token_hex(8)}/"
        self._named = 0
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Server | None = None
        self._socket = PrivateSocket(server)

    def bind(self, host: str, port: int, *, shared: bool) -> int:
        """The port, 0 for any free one. shared: with others of this user. Raises OSError."""
        self._listener = listener(host, port, shared=shared)
        return self._listener.getsockname()[1]

    async def open(self, tls: ssl.SSLContext | None) -> None:
        """Takes connections from now on, once the port is bound."""
        assert self._listener is not None, "bind() comes first"
        self._accepting = await asyncio.get_running_loop().create_server(
            lambda: _Client(self), sock=self._listener, ssl=tls, backlog=ACCEPTED
        )
        self._listener.listen(QUEUED)

    def close(self) -> None:
        """Takes no more connections. Those that are open end with the server's. Idempotent, also before open()."""
        if self._accepting is not None:
            self._accepting.close()
        if self._listener is not None:
            self._listener.close()

    def release(self) -> None:
        """Ends all connections, and drops the server's socket. Idempotent."""
        for relay in list(self._relays):
            relay.end()
        self._socket.close()

    def admit(self, relay: "_Client") -> bool:
        if len(self._relays) >= self._most:
            return False
        self._relays.add(relay)
        return True

    def leave(self, relay: "_Client") -> None:
        self._relays.discard(relay)
        self.turns.leave(relay)

    async def dial(self, relay: "_Client", peer: str) -> None:
        """Connects a client to gRPC, in its name. Raises OSError."""
        self._named += 1
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.bind(f"{self._names}{peer}.{self._named}")
            while not _connected(connection, self._socket.path):
                await asyncio.sleep(RETRY_SECONDS)
            await asyncio.get_running_loop().create_unix_connection(lambda: _Server(relay), sock=connection)
        except BaseException:
            connection.close()
            raise


def client_host(peer: str) -> str:
    """ipv4:HOST or ipv6:[HOST] of a client, by what gRPC calls its peer."""
    return unquote(peer.rpartition("/")[2].rpartition(":")[0])


def _connected(connection: socket.socket, path: str) -> bool:
    """Connects. False: not yet, since gRPC has many calls to take."""
    try:
        connection.connect(path)
    except BlockingIOError:
        return False
    return True


class CallLooks(grpc.aio.ServerInterceptor):
    """A server's first: tells the turns of each call that the server looks at."""

    def __init__(self, turns: CallTurns) -> None:
        self._turns = turns

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        self._turns.looked()
        return await continuation(handler_call_details)


class _Client(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, port: GuardedPort) -> None:
        self._port = port
        self._frames = ClientFrames()
        self._small, self._resets = Allowance(*SMALL_FRAMES), Allowance(*RESETS)
        self._server: _Server | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._full = self._late = False  # waits for gRPC to read; for its allowance
        self._ended = False  # a transport of TLS would say so later, and log each write until then
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream"
        self.transport = transport
        self._silence = self._loop.call_later(SILENT_SECONDS, self.end)
        if not self._port.admit(self):
            self.end()

    def data_received(self, data: bytes) -> None:
        try:
            self._frames.add(data)
        except NotHttp2:
            self.end()
            return
        if self._frames.held > HELD_BYTES:
            self.transport.pause_reading()
        if self._dialing is None and self._frames.begun:
            self._silence.cancel()
            self._dialing = asyncio.ensure_future(self._dial())
        self._enter()

    async def _dial(self) -> None:
        try:
            await self._port.dial(self, _name_of(self.transport))
        except OSError:
            self.end()

    def connected(self, server: "_Server") -> None:
        if self._ended:
            server.transport.abort()
        self._server = server
        self._enter()

    def _enter(self) -> None:
        if self._server is not None and not (self._full or self._late or self._ended):
            self._port.turns.enter(self)

    def pass_on(self, frames: int, calls: int) -> tuple[int, Rest]:
        """Passes frames on when CallTurns asks for it."""
        assert self._server is not None, "it enters when it is connected"
        passed = self._frames.take(frames, calls)
        if passed.content:
            self._server.transport.write(passed.content)
        if self._frames.held <= HELD_BYTES:
            self.transport.resume_reading()
        if passed.small:
            now = self._loop.time()
            late = max(self._small.spend(passed.small, now), self._resets.spend(passed.resets, now))
            if late:
                self._late = True
                self._loop.call_later(late, self._go_on)
        if self._full or self._late:
            return passed.calls, Rest.NOTHING
        rest = Rest.CALL if passed.blocked else Rest.FRAMES if passed.more else Rest.NOTHING
        return passed.calls, rest

    def _go_on(self) -> None:
        self._late = False
        if not self._ended and _has_left(self.transport):
            self.end()
        self._enter()

    def fill(self, *, full: bool) -> None:
        """Whether gRPC reads slower than the client sends."""
        self._full = full
        self._enter()

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.transport.resume_reading()

    def eof_received(self) -> None:
        self.end()  # TLS takes no more of what gRPC answers, and would log each piece

    def connection_lost(self, exc: Exception | None) -> None:
        self.end()

    def answer(self, data: bytes) -> None:
        """Passes gRPC's answer on."""
        if not self._ended:
            self.transport.write(data)

    def finish(self) -> None:
        """gRPC has ended its connection. What it said last still goes out."""
        self._ended = True
        self._port.turns.leave(self)
        self.transport.close()

    def end(self) -> None:
        """Ends both connections at once. Idempotent."""
        self._ended = True
        self._silence.cancel()
        self._port.leave(self)
        self.transport.abort()
        if self._server is not None:
            self._server.transport.abort()
        if self._dialing is not None:
            self._dialing.cancel()


class _Server(asyncio.Protocol):
    """The connection to gRPC in a client's name."""

    def __init__(self, client: _Client) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream"
        self.transport = transport
        self._client.connected(self)

    def data_received(self, data: bytes) -> None:
        self._client.answer(data)

    def pause_writing(self) -> None:
        self._client.fill(full=True)

    def resume_writing(self) -> None:
        self._client.fill(full=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.finish()


def _has_left(client: asyncio.Transport) -> bool:
    """Also of one that is not read now, for which asyncio would not say so."""
    poll = select.poll()
    poll.register(client.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _name_of(client: asyncio.Transport) -> str:
    """Returns the client's name as gRPC would call it."""
    host, port = client.get_extra_info("peername")[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
