"""Lets only callers with a server's bearer token call it (RFC 6750). Over gRPC an interceptor denies everybody else."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio

from tandem.workers.ports.ended_calls import heed_end

HEADER = "authorization"
OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""Load balancers ask for these without a token; they say nothing but whether the server serves."""

StubT = TypeVar("StubT")


class BearerToken:
    """The token that callers of a server must send."""

    def __init__(self, token: str) -> None:
        """ValueError when token is empty: an empty one would let everybody in."""
        if not token:
            raise ValueError("token is empty; a server needs one to ask for")
        self._expected = _credentials(token).encode()

    def admits(self, given: Sequence[object]) -> bool:
        """given: the values of HEADER. Takes as long for every token of a length."""
        return len(given) == 1 and hmac.compare_digest(str(given[0]).encode(), self._expected)


class TokenRequired(grpc.aio.ServerInterceptor):
    """Ends each call without `Bearer <token>` with UNAUTHENTICATED, methods that do not exist included."""

    def __init__(self, token: str, denied: Callable[[], None] = lambda: None) -> None:
        """denied: called for each call that is denied. ValueError when token is empty."""
        self._token = BearerToken(token)
        self._denied = denied

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == HEADER]
        if handler_call_details.method in OPEN_METHODS or self._token.admits(given):
            return await continuation(handler_call_details)
        self._denied()
        return denial()


def authorized(stub: StubT, token: str) -> StubT:
    """The same generated stub, each of whose calls carries `token`. Cheaper than a client interceptor."""
    metadata = ((HEADER, _credentials(token)),)
    for name, call in vars(stub).items():
        setattr(stub, name, _AuthorizedCall(call, metadata))
    return stub


class _AuthorizedCall:
    """A stub's method with metadata in addition to the caller's; future as grpc's blocking stubs have it."""

    def __init__(self, call: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._call = call
        self._metadata = metadata

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        own = self._metadata + options.pop("metadata", ())
        return self._call(*arguments, metadata=own, **options)

    def future(self, *arguments: Any, **options: Any) -> Any:
        return self._call.future(*arguments, metadata=self._metadata, **options)


def _credentials(token: str) -> str:
    return f"Bearer {token}"


def denial() -> Any:
    """A method that ends its call with UNAUTHENTICATED. It asks for no request: that may never come."""
    return grpc.stream_unary_rpc_method_handler(_deny)


async def _deny(request: Any, context: grpc.aio.ServicerContext) -> None:
    await heed_end()
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is needed")
