"""Servers that can be loaded, as one interface."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from tandem.cluster.tools.bench.sessions import Message
from tandem.cluster.tools.bench.timeline import Running

Endpoint = Literal["completions", "chat"]


class Refused(Exception):
    """A request failed. The message says how."""


@dataclass(frozen=True)
class Served:
    """What a server says of itself; None where it does not say so."""

    model: str
    vocab_size: int | None
    max_model_len: int | None


class Target(Protocol):
    """A server, to be used on one event loop, as an async context."""

    async def served(self) -> Served:
        """Raises Refused, CallError."""
        ...

    async def stream(self, messages: Sequence[Message], running: Running, timeout: float) -> None:
        """Sends a request, sets running.sent, and tells `running` of all that comes, to the end of the stream.

        Raises Refused when it fails, also when it takes more than `timeout` seconds.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class TargetSpec:
    """Where a target is, as plain values. grpc (HOST:PORT) is given, or urls: of servers that share the requests."""

    grpc: str = ""
    urls: tuple[str, ...] = ()
    endpoint: Endpoint = "completions"
    model: str = ""
    salt: str = ""
    token_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
