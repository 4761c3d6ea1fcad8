"""The gateway's HTTP port. The only user of uvicorn."""

import asyncio
import os
import socket
import ssl

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.cluster.credentials import ServerSecurity
from tandem.cluster.errors import StartFailed
from tandem.cluster.frontends.http.routes import HttpApp
from tandem.cluster.requests.call_limit import connections_per_frontend

START_POLL_SECONDS = 0.001
END_SECONDS = 2.0  # from the end of calls to the end of connections that no client reads
IDLE_SECONDS = 60.0  # from a new connection, or an answer, to the end of the next request's head
SILENT_SECONDS = 60  # without a sign of life, or with data that the client does not read
OPTIONS = (  # which connections inherit from their listener
    ((socket.IPPROTO_TCP, socket.TCP_NODELAY), 1),  # asyncio sets it for sockets that it made; else events wait 40 ms
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), SILENT_SECONDS // 2),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), SILENT_SECONDS // 6),
    ((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), 1000 * SILENT_SECONDS),
)


class Connection(H11Protocol):
    """One client's connection, which ends when idle. uvicorn would wait for a request's head without bound."""

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

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_of_idleness.cancel()
        super().connection_lost(exc)

    def _become_idle(self) -> None:
        self.idle_since = self.loop.time()
        self._end_of_idleness = self.loop.call_later(IDLE_SECONDS, self.transport.close)

    def _end_the_longest_idle(self) -> None:
        """Ends one, perhaps this one, unless enough end already: strangers must not keep others out."""
        there = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        idle = [one for one in there if one.idle_since is not None]
        if idle and len(there) > connections_per_frontend():
            min(idle, key=lambda one: one.idle_since or 0.0).transport.abort()


class HttpServer:
    """Serves an application on the event loop of start()'s caller. stop() closes what start() opened."""

    def __init__(
        self,
        app: HttpApp,
        host: str,
        port: int,
        security: ServerSecurity,
        *,
        shared: bool,
        key: str = "gateway.http_port",
    ) -> None:
        """shared: as of grpc_server(). key: the configuration's, of the port."""
        self._key = key
        self._shared = shared
        self._app = app
        self._host = host
        self._port = port
        self._security = security
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Opens the port, 0 for any free one; HOST:PORT. StartFailed when the port cannot be had."""
        listener = self._listen()
        config = uvicorn.Config(
            self._app,
            http=Connection,
            timeout_keep_alive=IDLE_SECONDS,  # type: ignore[arg-type]  # any number
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,  # whoever is on this machine could say to be another client
            server_header=False,
            ssl_certfile=self._security.tls_cert,
            ssl_keyfile=self._security.tls_key,
            ssl_ca_certs=self._security.client_ca,
            ssl_cert_reqs=ssl.CERT_NONE if self._security.client_ca is None else ssl.CERT_REQUIRED,
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(START_POLL_SECONDS)
        port = listener.getsockname()[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    async def stop(self, grace: float) -> None:
        """Takes no new calls. Calls under way have `grace` seconds, then they end with an error."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = grace + END_SECONDS  # type: ignore[assignment]  # any number
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=grace)
        self._app.end_calls()
        await self._serving

    def _listen(self) -> socket.socket:
        """The listening socket. uvicorn's own would end the process if the port is in use."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            both = self._host == "::"
            listener = socket.create_server(
                (self._host, self._port), family=family, dualstack_ipv6=both, reuse_port=self._shared
            )
        except OSError as error:
            raise StartFailed(
                f"{self._key} {self._port} on {self._host} cannot be opened ({os.strerror(error.errno or 0)}); "
                "choose a free one, or 0 for any free one"
            ) from error
        for option, value in OPTIONS:
            listener.setsockopt(*option, value)
        return listener
