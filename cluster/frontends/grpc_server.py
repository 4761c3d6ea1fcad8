"""The gateway's gRPC server, with bounds on calls at a time and on clients' silence."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from tandem.cluster.errors import DeadlineExceeded, InvalidRequest, Overloaded, StartFailed
from tandem.cluster.errors.statuses import grpc_status, refuse
from tandem.cluster.frontends.grpc_access import AccessRequired, refusal
from tandem.cluster.keys.gate import Gate
from tandem.cluster.requests.body_budget import Body, BodyBudget, current_body
from tandem.cluster.requests.call_limit import CallLimit, connections_per_frontend
from tandem.workers.ports.authentication import OPEN_METHODS
from tandem.workers.ports.call_turns import CallTurns
from tandem.workers.ports.connections import lenient_options
from tandem.workers.ports.ended_calls import read_message
from tandem.workers.ports.guarded_port import CallLooks, GuardedPort, client_host
from tandem.workers.ports.tls import bracketed
from tandem.workers.service.well_formed import WellFormedRequired

IDLE_MS = 600_000  # of a connection without a call; clients connect again by themselves
SILENT_MS = 60_000  # without a sign of life, and again without the answer to a ping
REQUEST_SECONDS = 60.0  # for a client's request, or for all requests of a call
ANSWER_BYTES = 1 << 24  # of one message of an answer, which may have many log-probabilities
SLOW_SECONDS = 0.05  # between two looks at whether a message is there
SLOW_LOOKS = 5  # after which one counts as the largest: gRPC does not say how far it is
UNREAD_CALLS = 512  # of one connection, whose requests have not come: it cannot fill gateway.max_calls with them
OPEN_CALLS = 256  # of each method that needs no token: strangers take no room from callers

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


def grpc_server(
    limit: CallLimit,
    bodies: BodyBudget,
    gate: Gate,
    max_bytes: int,
    turns: CallTurns,
    rejected: Callable[[str], None],
) -> grpc.aio.Server:
    """A server without services and without a port. gate: admits callers. max_bytes: of one message. turns: of its
    port. rejected: hears of each call that no method takes, by its status."""
    access = [] if gate.is_open else [AccessRequired(gate, rejected)]
    bounded = BoundedCalls(limit, bodies, max_bytes, rejected)
    return grpc.aio.server(
        options=server_options(max_bytes), interceptors=[CallLooks(turns), *access, bounded, WellFormedRequired()]
    )


def server_options(max_bytes: int) -> tuple[tuple[str, int], ...]:
    """Returns the options of grpc_server(): bounds on messages, connections and silence."""
    return (
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max(max_bytes, ANSWER_BYTES)),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.keepalive_time_ms", SILENT_MS),
        ("grpc.keepalive_timeout_ms", SILENT_MS),
        ("grpc.http2.ping_timeout_ms", SILENT_MS),
        *lenient_options(),
    )


def bind_port(
    server: grpc.aio.Server, turns: CallTurns, host: str, port: int, *, shared: bool
) -> tuple[GuardedPort, str]:
    """Returns the port, which opens once the server has started, and its HOST:PORT. Port 0 takes any free one. Raises
    StartFailed if it cannot be had.

    shared: whether other processes of this user open the same port. The kernel gives each connection to one process.
    """
    guarded = GuardedPort(server, turns, max(1, connections_per_frontend() // 2))  # each has two files
    try:
        return guarded, f"{bracketed(host)}:{guarded.bind(host, port, shared=shared)}"
    except OSError as error:
        raise StartFailed(
            f"gateway.port {port} on {host} cannot be opened ({os.strerror(error.errno or 0)}); "
            "choose a free one, or 0 for any free one"
        ) from error


class BoundedCalls(grpc.aio.ServerInterceptor):
    """Refuses calls beyond the limit before it reads their requests, and ends calls that send none.

    It counts requests while they come, and until they are validated.
    """

    def __init__(self, limit: CallLimit, bodies: BodyBudget, max_bytes: int, rejected: Callable[[str], None]) -> None:
        self._limit = limit
        self._bodies = bodies
        self._max_bytes = max_bytes
        self._rejected = rejected
        self._unread: Counter[str] = Counter()  # calls, by their connections
        self._open = {method: CallLimit(OPEN_CALLS) for method in OPEN_METHODS}

    async def intercept_service(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        try:
            self._open.get(handler_call_details.method, self._limit).admit()
        except Overloaded as error:
            self._rejected(grpc_status(error).name)
            return refusal(error)
        handler = await continuation(handler_call_details)
        return None if handler is None else self._bounded(handler)

    def _bounded(self, handler: Any) -> Any:
        """Returns the method in a form that reads its request itself: gRPC would wait for it without bound."""
        if handler.request_streaming:
            behave: Any = _in_time(handler.stream_stream)
        else:
            behave = self._with_request(handler.unary_stream if handler.response_streaming else handler.unary_unary)
        remade = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return remade(behave, handler.request_deserializer, handler.response_serializer)

    def _with_request(self, method: Any) -> Callable[..., Awaitable[Any]]:
        async def behave(_: object, context: grpc.aio.ServicerContext) -> Any:
            body = self._bodies.open(host_of(context))
            try:
                request = await self._received(context, body)
                current_body.set(body)
                answering = method(request, context)
                del request  # which may be large, and the call long
                return await answering
            finally:
                body.release()

        return behave

    async def _received(self, context: grpc.aio.ServicerContext, body: Body) -> Any:
        """Returns the call's request, unless its connection has too many others that have not come."""
        connection = context.peer()
        if self._unread[connection] >= UNREAD_CALLS:
            reason = f"requests of {UNREAD_CALLS} calls over this connection have not come yet"
            await refuse(context, Overloaded(f"{reason}; finish some, or open another connection"))
        self._unread[connection] += 1
        try:
            return await self._read(context, body)
        finally:
            self._unread[connection] -= 1
            if not self._unread[connection]:
                del self._unread[connection]

    async def _read(self, context: grpc.aio.ServicerContext, body: Body) -> Any:
        """Returns the call's request. A request that comes slowly holds as many bytes as the largest."""
        refusal: Overloaded | None = None
        looks = 0

        def look() -> None:
            nonlocal looking, looks, refusal
            looks += 1
            if looks < SLOW_LOOKS:  # the event loop may have been late itself: it reads between two looks
                looking = loop.call_later(SLOW_SECONDS, look)
                return
            try:
                body.hold(self._max_bytes)
            except Overloaded as error:
                refusal = error
                limit.reschedule(loop.time())

        loop = asyncio.get_running_loop()
        looking = loop.call_later(SLOW_SECONDS, look)
        try:
            async with asyncio.timeout(REQUEST_SECONDS) as limit:
                request = await read_message(context)
            body.hold(len(request) if isinstance(request, bytes) else 0)
        except TimeoutError:
            if refusal is None:
                await _too_late(context)
            await refuse(context, refusal)
        except Overloaded as error:
            await refuse(context, error)
        finally:
            looking.cancel()
        if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # unseen by pyright
            await refuse(context, InvalidRequest("the call has no request; one message is needed"))
        return request


def _in_time(method: Callable[..., AsyncIterator[Any]]) -> Callable[..., Awaitable[None]]:
    async def behave(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                async for answer in method(requests, context):
                    await context.write(answer)
        except TimeoutError:
            await _too_late(context)

    return behave


def host_of(context: grpc.aio.ServicerContext) -> str:
    """Returns the client's host, without its port."""
    return client_host(context.peer())


async def _too_late(context: grpc.aio.ServicerContext) -> NoReturn:
    reason = f"the request did not come, or had no end, within {REQUEST_SECONDS:g} s"
    await refuse(context, DeadlineExceeded(reason))
