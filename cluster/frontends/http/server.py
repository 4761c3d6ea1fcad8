"""The gateway's HTTP port."""

import asyncio
import os
import socket
import ssl
from functools import partial

import uvicorn

from tandem.cluster.credentials import ServerSecurity
from tandem.cluster.errors import StartFailed
from tandem.cluster.frontends.http.app import HttpApp
from tandem.cluster.frontends.http.backlog import Backlog
from tandem.cluster.frontends.http.connection import IDLE_SECONDS, Connection
from tandem.workers.ports.listener import ACCEPTED, QUEUED, listener

START_POLL_SECONDS = 0.001
END_SECONDS = 2.0  # from the end of calls to the end of connections that no client reads


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
        """Opens the port, 0 for any free one. Returns HOST:PORT. Raises StartFailed if the port cannot be had."""
        listening = self._listen()
        config = uvicorn.Config(
            self._app,
            http=partial(Connection, backlog=Backlog()),  # type: ignore[arg-type]  # what makes a protocol
            backlog=ACCEPTED,  # asyncio accepts as many in one turn
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
        self._serving = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(START_POLL_SECONDS)
        listening.listen(QUEUED)
        port = listening.getsockname()[1]
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
        """Opens the listening socket. uvicorn's own would end the process if the port is in use."""
        try:
            return listener(self._host, self._port, shared=self._shared)
        except OSError as error:
            raise StartFailed(
                f"{self._key} {self._port} on {self._host} cannot be opened ({os.strerror(error.errno or 0)}); "
                "choose a free one, or 0 for any free one"
            ) from error
