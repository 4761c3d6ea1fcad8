"""Tokens and certificates of gateways and clients, from files that only their owner can read."""

import ipaddress
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc

from tandem.cluster.errors import ConfigError
from tandem.workers.ports.authentication import authorized

MIN_TOKEN_LENGTH = 16
StubT = TypeVar("StubT")


@dataclass(frozen=True)
class ServerSecurity:
    """Paths of the gateway's files; None: it does without. client_ca: clients must show a certificate that it signed.

    api_key: the token itself, in place of a file. salt_by_token: callers share cached prefixes only with those that
    show the same token.
    """

    token_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    salt_by_token: bool = False
    api_key: str | None = field(default=None, repr=False)

    def check(self) -> None:
        """Raises ConfigError for a file that cannot be read or used."""
        self.token()
        self.tls("h2")

    def token(self) -> str | None:
        if self.api_key is not None:
            return check_token("security.api_key", self.api_key)
        return None if self.token_file is None else read_token(Path(self.token_file), "security.token_file")

    def tls(self, protocol: str) -> ssl.SSLContext | None:
        """Makes the TLS context of a server that speaks `protocol` (ALPN). None without TLS. Raises ConfigError as
        check() does."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        _read_pair("security.", self.tls_key, self.tls_cert)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_expanded(self.tls_cert), _expanded(self.tls_key))
        context.set_alpn_protocols([protocol])
        if self.client_ca is not None:
            _read_ca("security.client_ca", self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(_expanded(self.client_ca))
        return context


@dataclass(frozen=True)
class ClientSecurity:
    """A client's token and paths of its certificates."""

    token: str | None = None
    tls_ca: str | None = None  # asks for TLS; it signed the gateway's certificate
    tls_cert: str | None = None  # for a gateway that asks for mutual TLS
    tls_key: str | None = None

    def credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """None without TLS. ConfigError for half a key pair, unusable files, or a token without TLS on a network."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key: give both or neither")
        if self.tls_ca is None:
            if self.tls_cert is not None:
                raise ConfigError("tls_ca is missing; tls_cert is of use only with it")
            if self.token is not None and not is_loopback(address.rpartition(":")[0].strip("[]")):
                raise ConfigError(f"tls_ca is missing; without TLS a token is not sent to {address}")
            return None
        pair = (None, None)
        if self.tls_key is not None and self.tls_cert is not None:
            pair = _read_pair("", self.tls_key, self.tls_cert)
        return grpc.ssl_channel_credentials(_read_ca("tls_ca", self.tls_ca), *pair)

    def authorize(self, stub: StubT) -> StubT:
        return stub if self.token is None else authorized(stub, self.token)


def read_token(path: Path, name: str) -> str:
    """Reads the one line of a token file. ConfigError unless only its owner may read it and it is long enough. name: of
    the key or the option that gives the file."""
    return check_token(f"{name} {path}", _read_private(name, str(path)).decode("ascii", "replace").strip())


def check_token(source: str, token: str) -> str:
    """Returns the token. ConfigError, which does not show the token, unless it is long enough."""
    if len(token) < MIN_TOKEN_LENGTH or not token.isprintable() or " " in token or not token.isascii():
        raise ConfigError(
            f"{source} holds {len(token)} characters; it must hold at least {MIN_TOKEN_LENGTH} of printable ASCII "
            "without spaces: `openssl rand -hex 32` makes some"
        )
    return token


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_pair(section: str, key: str, certificate: str) -> tuple[bytes, bytes]:
    """Reads the key and its certificate, and checks them: gRPC would only say that it cannot open the port."""
    pair = _read_private(f"{section}tls_key", key), _read(f"{section}tls_cert", certificate)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_expanded(certificate), _expanded(key), password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{section}tls_cert {certificate} and tls_key {key} must be a certificate and its key, in PEM and without "
            f"a passphrase: {error}"
        ) from None
    return pair


def _read_ca(name: str, path: str) -> bytes:
    content = _read(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(_expanded(path))
    except ssl.SSLError as error:
        raise ConfigError(f"{name} {path} must hold certificates, in PEM: {error}") from None
    return content


def _read(key: str, path: str) -> bytes:
    try:
        return _expanded(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key} is {path}, which cannot be read: {error.strerror}") from None


def _read_private(key: str, path: str) -> bytes:
    content = _read(key, path)
    mode = stat.S_IMODE(_expanded(path).stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{key} {path} has mode {mode:o}; others must not read it: chmod 600")
    return content


def _expanded(path: str) -> Path:
    return Path(path).expanduser()
