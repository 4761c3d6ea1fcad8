"""The gRPC status of each error of a worker."""

import asyncio
import logging
from concurrent.futures import Future
from contextvars import ContextVar
from typing import NoReturn, TypeVar

import grpc
import grpc.aio

from tandem.cache.plan.errors import CacheError
from tandem.transfer.errors import TransferError
from tandem.workers.errors import (
    Aborted,
    AdapterNotHeld,
    CorruptKV,
    ForwardFailed,
    InvalidCall,
    LeaseExpired,
    LogitsNotFinite,
    NoRoom,
    PeerLost,
    RankLost,
    Stale,
    WriterNotQuiet,
)
from tandem.workers.event_loop import unwatched
from tandem.workers.logs import Named, of_requests
from tandem.workers.wire.messages import NO_SLOT_KEY, QUEUED_KEY, WOULD_PARK_KEY

T = TypeVar("T")
log = logging.getLogger(__name__)
call_of: "ContextVar[Named | None]" = ContextVar("call_of", default=None)
"""The message that began this call, where it is about a request."""

STATUS_OF_ERROR: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (AdapterNotHeld, grpc.StatusCode.NOT_FOUND),
    (Stale, grpc.StatusCode.FAILED_PRECONDITION),
    (Aborted, grpc.StatusCode.ABORTED),
    (LeaseExpired, grpc.StatusCode.ABORTED),
    (CorruptKV, grpc.StatusCode.DATA_LOSS),
    (InvalidCall, grpc.StatusCode.INVALID_ARGUMENT),
    (LogitsNotFinite, grpc.StatusCode.OUT_OF_RANGE),
    (ForwardFailed, grpc.StatusCode.INTERNAL),
    (WriterNotQuiet, grpc.StatusCode.UNAVAILABLE),
    (PeerLost, grpc.StatusCode.UNAVAILABLE),
    (RankLost, grpc.StatusCode.UNAVAILABLE),
    (CacheError, grpc.StatusCode.INVALID_ARGUMENT),
    (TransferError, grpc.StatusCode.INVALID_ARGUMENT),
)


async def refuse(context: grpc.aio.ServicerContext, error: Exception) -> NoReturn:
    """Ends the call with the error's status and text. An error of no known type is INTERNAL, and logged."""
    for kind, status in STATUS_OF_ERROR:
        if isinstance(error, kind):
            await context.abort(status, str(error), _advice(error))
    messages = [message for message in (call_of.get(),) if message is not None]
    log.exception("a call failed", exc_info=error, extra=of_requests(*messages))
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")


def _advice(error: Exception) -> tuple[tuple[str, str], ...]:
    if not isinstance(error, NoRoom):
        return ()
    said = (WOULD_PARK_KEY, error.would_park), (NO_SLOT_KEY, error.lacks_slot)
    return tuple((key, "1") for key, is_so in said if is_so)


async def outcome(context: grpc.aio.ServicerContext, future: "Future[T]") -> T:
    """The result that the step thread will set, or refuse().

    The caller's cancellation must not cancel the future: others may wait for it, too.
    """
    try:
        return await asyncio.shield(unwatched(asyncio.wrap_future(future)))
    except Exception as error:
        await refuse(context, error)


async def queued(context: grpc.aio.ServicerContext, future: "Future[T]") -> T:
    """Returns outcome(). Tells the caller before that its prompts are queued, so that it knows even if this process
    dies."""
    await context.send_initial_metadata(((QUEUED_KEY, "1"),))
    return await outcome(context, future)
