"""Well-formed messages: bytes that parse, and no field that this version does not know."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

PREFIX = "/tandem.v1."


class Malformed(ValueError):
    """The bytes are no message of their kind, or hold a field of another version; the text names it."""


class WellFormedRequired(grpc.aio.ServerInterceptor):
    """Ends calls of our own services that bring anything else with INVALID_ARGUMENT, before their handlers see them."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(PREFIX):
            return handler

        def parse(data: bytes) -> Message | Malformed:
            try:
                message = handler.request_deserializer(data)
                _refuse_unknown_fields(message)
                return message
            except DecodeError:
                return Malformed(f"the {len(data)} bytes of the request cannot be read as its message")
            except Malformed as error:
                return error

        if handler.request_streaming:

            async def behave_stream(
                requests: AsyncIterable[Message | Malformed], context: grpc.aio.ServicerContext
            ) -> None:
                await handler.stream_stream(_well_formed(requests, context), context)

            return grpc.stream_stream_rpc_method_handler(
                behave_stream, request_deserializer=parse, response_serializer=handler.response_serializer
            )
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def behave(request: Message | Malformed, context: grpc.aio.ServicerContext) -> Any:
            if isinstance(request, Malformed):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
            return await method(request, context)

        remade = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return remade(behave, request_deserializer=parse, response_serializer=handler.response_serializer)


async def _well_formed(
    requests: AsyncIterable[Message | Malformed], context: grpc.aio.ServicerContext
) -> AsyncIterator[Message]:
    async for request in requests:
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
        yield request


def _refuse_unknown_fields(message: Message) -> None:
    """A field that a later version gives a meaning would lose it here in silence."""
    for name, part in _parts(message, ""):
        unknown = UnknownFieldSet(part)
        if len(unknown):
            least = min(field.field_number for field in unknown)
            known = ", ".join(field.name for field in part.DESCRIPTOR.fields) or "none"
            whole = name or part.DESCRIPTOR.name
            raise Malformed(f"{whole} has unknown field number {least}; this version knows {known}")


def _parts(message: Message, name: str) -> Iterator[tuple[str, Message]]:
    """The message and every message in it, with dotted names."""
    yield name, message
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue  # our maps hold numbers
        dotted = f"{name}.{field.name}" if name else field.name
        for part in value if field.is_repeated else (value,):
            yield from _parts(part, dotted)
