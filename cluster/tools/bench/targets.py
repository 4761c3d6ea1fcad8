"""Servers that can be loaded, as one interface."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tandem.cluster.tools.bench.sessions import Message
from tandem.cluster.tools.bench.timeline import Running

Endpoint = Literal["completions", "chat"]


class Refused(Exception):
    """A request failed. The message says how."""


@dataclass(frozen=True)
class Served:
    """The limits that a server reports; None if it reports none."""

    model: str
    vocab_size: int | None
    max_model_len: int | None


class Target(Protocol):
    """A server, to be used on one event loop and closed there."""

    async def served(self) -> Served:
        """Returns the server's limits. Raises Refused, CallError."""
        ...

    async def stream(self, messages: Sequence[Message], running: Running, timeout: float) -> None:
        """Sends a request, sets running.sent, and tells `running` of all messages, to the end of the stream.

        Raises Refused when it fails, also when it takes more than `timeout` seconds.
        """
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class TargetSpec:
    """Where a target is, and what its requests ask for, as plain values.

    grpc (HOST:PORT) is given, or urls: of servers that share the requests. first_token_seconds: tandem's parameter of
    that name. asked_tokens: max_tokens of each request over gRPC, which the target ends when its expected tokens have
    come; None asks for these.
    """

    grpc: str = ""
    urls: tuple[str, ...] = ()
    endpoint: Endpoint = "completions"
    model: str = ""
    salt: str = ""
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    temperature: float = field(default=0.0, kw_only=True)
    first_token_seconds: float | None = field(default=None, kw_only=True)
    asked_tokens: int | None = field(default=None, kw_only=True)
