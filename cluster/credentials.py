"""Secrets and certificates of a gateway and of its clients, read from files that only their owner can read."""

import ipaddress
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from tandem.cluster.errors import ConfigError
from tandem.workers.authentication import authorized

MIN_TOKEN_LENGTH = 16
StubT = TypeVar("StubT")


@dataclass(frozen=True)
class ServerSecurity:
    """Paths; None where the gateway does without. client_ca: clients must show a certificate that it signed."""

    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None

    def token(self) -> str | None:
        return None if self.token_file is None else read_token(Path(self.token_file))

    def credentials(self) -> grpc.ServerCredentials | None:
        """None without TLS. ConfigError when a file cannot be read."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        pair = (_read_private("security.tls_key", self.tls_key), _read("security.tls_cert", self.tls_cert))
        ca = None if self.client_ca is None else _read("security.client_ca", self.client_ca)
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


@dataclass(frozen=True)
class ClientSecurity:
    """What a client shows, and whom it believes. Paths, and the token itself.

    tls_ca: speaks TLS, to a gateway whose certificate it signed. tls_cert, tls_key: for a gateway that asks for them.
    """

    token: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """None without TLS. ConfigError for half a key pair, or when a token would go over a network in the clear."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key: give both or neither")
        if self.tls_ca is None:
            if self.tls_cert is not None:
                raise ConfigError("tls_ca is missing; tls_cert is of use only with it")
            if self.token is not None and not is_loopback(address.rpartition(":")[0].strip("[]")):
                raise ConfigError(f"tls_ca is missing; without TLS a token is not sent to {address}")
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls_ca", self.tls_ca),
            private_key=None if self.tls_key is None else _read_private("tls_key", self.tls_key),
            certificate_chain=None if self.tls_cert is None else _read("tls_cert", self.tls_cert),
        )

    def authorize(self, stub: StubT) -> StubT:
        return stub if self.token is None else authorized(stub, self.token)


def read_token(path: Path) -> str:
    """The one line of a token file. ConfigError unless only its owner may read it and it is long enough."""
    token = _read_private("token_file", str(path)).decode("ascii", "replace").strip()
    if len(token) < MIN_TOKEN_LENGTH or not token.isprintable() or " " in token or not token.isascii():
        raise ConfigError(
            f"token_file {path} holds {len(token)} characters; at least {MIN_TOKEN_LENGTH} of printable ASCII without "
            "spaces are accepted: `openssl rand -hex 32` makes some"
        )
    return token


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{key} {path} cannot be read: {error.strerror}") from None


def _read_private(key: str, path: str) -> bytes:
    content = _read(key, path)
    mode = stat.S_IMODE(Path(path).expanduser().stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{key} {path} has mode {mode:o}; others must not read it: chmod 600")
    return content
