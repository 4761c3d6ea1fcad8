"""Calls of a gateway's HTTP server, one at a time on each connection."""

import http.client
import json
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tandem.cluster.credentials import is_loopback
from tandem.cluster.errors import ConfigError, UsageError

MOST_ANSWER = 256 << 20  # bytes
CONNECT_SECONDS = 10.0
KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    request_id: str
    retry_seconds: float | None  # after which the gateway asks for another try

    @property
    def value(self) -> Any:
        """Returns the body's JSON, or its text if it is no JSON, as a proxy's may be."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return self.body.decode(errors="replace")


@dataclass(frozen=True)
class Server:
    """The gateway's address. tls: None without TLS."""

    host: str
    port: int
    path: str
    token: str | None
    tls: ssl.SSLContext | None

    @classmethod
    def of_url(cls, url: str, token: str | None, tls: ssl.SSLContext | None) -> "Server":
        """Reads a URL, which may end with /v1. Raises UsageError unless it is http or https, and the token may be sent
        there. tls: for https, in place of the default."""
        try:
            parts = urlsplit(url.rstrip("/"))
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise UsageError(f"--url is {url!r:.80}: {error}; it must be like http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url is {url!r:.80}; it must be like http://127.0.0.1:8000")
        if token is not None and parts.scheme == "http" and not is_loopback(parts.hostname):
            raise UsageError(f"--url is {url!r:.80}; use https: without TLS, no token is sent to another host")
        secure = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        return cls(parts.hostname, port, parts.path.removesuffix("/v1"), token, secure)


def tls_context(ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Makes the TLS context; None without a CA. Raises ConfigError for files that cannot be used."""
    if ca is None:
        return None
    try:
        context = ssl.create_default_context(cafile=str(ca))
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_ca {ca}, tls_cert {certificate} and tls_key {key} cannot be used: {error}") from None
    return context


class Connection:
    """One thread's connection; another may call break_off(). The first call opens it, as does one after a failure."""

    def __init__(self, server: Server, timeout: float) -> None:
        """timeout: seconds without a byte from the gateway after which a call fails."""
        self._server = server
        self._timeout = timeout
        self._open: http.client.HTTPConnection | None = None
        self._broken_off = False

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        """Raises OSError, TimeoutError among them, where there is no whole answer."""
        if self._broken_off:
            raise ConnectionAbortedError("the batch stops")
        server = self._server
        headers = {"accept": "application/json"}
        if server.token is not None:
            headers["authorization"] = f"Bearer {server.token}"
        content = None
        if body is not None:
            content, headers["content-type"] = json.dumps(body).encode(), "application/json"
        try:
            if self._open is None:
                self._open = self._connection()
            self._open.request(method, server.path + path, content, headers)
            answer = self._open.getresponse()
            read = answer.read(MOST_ANSWER + 1)
            if len(read) > MOST_ANSWER:
                raise ConnectionError(f"an answer has more than {MOST_ANSWER} bytes")
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if isinstance(error, OSError):
                raise
            raise ConnectionError(f"no HTTP: {error!r:.200}") from None
        return Answer(answer.status, read, answer.headers.get("x-request-id", ""), _retry_seconds(answer.headers))

    def break_off(self) -> None:
        """Ends the call under way and all later ones with an error."""
        self._broken_off = True
        with suppress(OSError, AttributeError):  # it may close meanwhile
            self._open.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _connection(self) -> http.client.HTTPConnection:
        """Answers may take long. A host that is gone meanwhile is noticed within a minute."""
        server = self._server
        if server.tls is None:
            opened = http.client.HTTPConnection(server.host, server.port, timeout=CONNECT_SECONDS)
        else:
            opened = http.client.HTTPSConnection(server.host, server.port, timeout=CONNECT_SECONDS, context=server.tls)
        try:
            opened.connect()
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_SECONDS:g} s") from None
        opened.sock.settimeout(self._timeout)
        opened.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            opened.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return opened


def _retry_seconds(headers: http.client.HTTPMessage) -> float | None:
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with suppress(ValueError):
            if (seconds := float(headers.get(name, "")) * unit) >= 0:
                return seconds
    return None
