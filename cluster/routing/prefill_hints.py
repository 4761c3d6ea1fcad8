"""Prompts that a prefill worker hears of before they have a place, and the first tokens that come back."""

import asyncio
from contextlib import suppress

import grpc
import grpc.aio

from tandem.proto import worker_pb2, worker_pb2_grpc

SEND_SECONDS = 1.0
STREAM_SECONDS = 3600.0

Call = grpc.aio.StreamStreamCall
Drawn = asyncio.Future[worker_pb2.FirstToken]


class Announcements:
    """The stream of Worker/Announce to one worker; the first prompt opens it, and the next one when it has ended.

    All that goes over it is a hint, and nothing here fails. Used on the event loop of its stub.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        self._stub = stub
        self._turn = asyncio.Lock()  # a stream takes one message at a time
        self._call: Call | None = None
        self._reader: asyncio.Task[None] | None = None
        self._expected: dict[str, Drawn] = {}

    def expect(self, request_id: str) -> Drawn:
        """Will have that request's first token, if it is told here. To be cancelled where nobody waits any more."""
        drawn: Drawn = asyncio.get_running_loop().create_future()
        drawn.add_done_callback(lambda _: self._expected.pop(request_id, None))
        self._expected[request_id] = drawn
        return drawn

    async def send(self, request: worker_pb2.AnnounceRequest) -> None:
        """Returns when the message is on its way, or lost."""
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(SEND_SECONDS), self._turn:
                await self._open().write(request)

    async def close(self) -> None:
        """Nothing more comes. Idempotent."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait((self._reader,))

    def _open(self) -> Call:
        call = self._call
        if call is None or call.done():
            call = self._call = self._stub.Announce(timeout=STREAM_SECONDS)
            self._reader = asyncio.create_task(self._read(call))
        return call

    async def _read(self, call: Call) -> None:
        with suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            async for first in call:
                drawn = self._expected.get(first.request_id)
                if drawn is not None and not drawn.done():  # told twice, or nobody waits any more
                    drawn.set_result(first)
