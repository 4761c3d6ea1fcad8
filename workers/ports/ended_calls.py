"""Calls whose clients leave. grpcio never frees an operation that is cancelled, nor one that begins when its call has
ended (record 0122)."""

import asyncio
from typing import Any

import grpc.aio

from tandem.workers.event_loop import unwatched

LEFT_SECONDS = 0.1  # within which gRPC cancels the task of a call whose client has left, also where many leave at once


async def heed_end() -> None:
    """Returns if the call of this task goes on. Call it before answering a call of which nothing was read."""
    await asyncio.sleep(LEFT_SECONDS)


async def read_message(context: grpc.aio.ServicerContext) -> Any:
    """Reads a message like context.read(). If its call is cancelled, the read goes on and ends by itself."""
    try:
        message = await asyncio.shield(unwatched(asyncio.ensure_future(context.read())))
    except Exception:
        await heed_end()
        raise
    if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # unseen by pyright
        await heed_end()
    return message
