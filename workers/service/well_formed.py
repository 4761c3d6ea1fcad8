"""Well-formed messages: bytes that parse, of no more parts than one can take, and no field that this version does not
know."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from functools import lru_cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tandem.proto import admin_pb2, inference_pb2, peer_pb2, worker_pb2
from tandem.workers.service.turns import ClientTurns
from tandem.workers.service.wire_look import Malformed, MessageLayout, layout_of, look

FILES = (inference_pb2, admin_pb2, worker_pb2, peer_pb2)


@lru_cache
def kinds() -> dict[str, tuple[type[Message], MessageLayout]]:
    """The request of each method of our own services, by the method's path."""
    return {
        f"/{service.full_name}/{method.name}": (GetMessageClass(method.input_type), layout_of(method.input_type))
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


class WellFormedRequired(grpc.aio.ServerInterceptor):
    """Ends calls of our own services that bring anything else with INVALID_ARGUMENT, before their handlers see them.

    Long messages are looked at and parsed one after another, in slices, between which the event loop does other work.
    """

    def __init__(self) -> None:
        self._turns = ClientTurns(1)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        known = kinds().get(handler_call_details.method)
        if handler is None or known is None:
            return handler
        kind, layout = known

        if handler.request_streaming:

            async def behave_stream(requests: AsyncIterable[bytes], context: grpc.aio.ServicerContext) -> None:
                await handler.stream_stream(self._parsed_stream(kind, layout, requests, context), context)

            return grpc.stream_stream_rpc_method_handler(behave_stream, response_serializer=handler.response_serializer)
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def behave(data: bytes, context: grpc.aio.ServicerContext) -> Any:
            parsing = self._parsed(kind, layout, data, context)
            del data  # which may be large, and the call long
            answering = method(await parsing, context)
            return await answering

        remade = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return remade(behave, response_serializer=handler.response_serializer)

    async def _parsed_stream(
        self,
        kind: type[Message],
        layout: MessageLayout,
        requests: AsyncIterable[bytes],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[Message]:
        async for data in requests:
            yield await self._parsed(kind, layout, data, context)

    async def _parsed(
        self, kind: type[Message], layout: MessageLayout, data: bytes, context: grpc.aio.ServicerContext
    ) -> Message:
        looking = look(data, layout)
        try:
            for _ in looking:  # it is a long one
                async with self._turns.turn(context.peer().rpartition(":")[0]):
                    for _ in looking:
                        await asyncio.sleep(0)
                    return _parse(kind, data)
            return _parse(kind, data)
        except Malformed as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort() raises") from None


def _parse(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Malformed(f"the {len(data)} bytes of the request cannot be read as its message") from None
