"""Announces prompts to a prefill worker before they are placed, and takes in the first tokens that come back."""

import asyncio
from contextlib import suppress
from typing import Any

from tandem.cluster.errors import WorkerCallError
from tandem.cluster.errors.statuses import worker_errors
from tandem.proto import worker_pb2, worker_pb2_grpc

SEND_SECONDS = 1.0
STREAM_SECONDS = 3600.0
WORKER = "the prefill worker"

EarlyToken = asyncio.Future[worker_pb2.FirstToken]


class PrefillHints:
    """The gRPC stream of Worker/Announce to one worker. The first prompt opens it.

    Messages on it are hints, so nothing here fails. Used on the event loop of its stub.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        self._stub = stub
        self._turn = asyncio.Lock()  # a gRPC stream takes one message at a time
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._expected: dict[str, EarlyToken] = {}

    def expect(self, request_id: str) -> EarlyToken:
        """Returns a future for the request's first token, which may never come. Cancel it when nobody waits any
        more."""
        token: EarlyToken = asyncio.get_running_loop().create_future()
        token.add_done_callback(lambda _: self._expected.pop(request_id, None))
        self._expected[request_id] = token
        return token

    async def send(self, request: worker_pb2.AnnounceRequest) -> None:
        """Returns when the message is on its way, or lost."""
        with suppress(WorkerCallError, asyncio.InvalidStateError, TimeoutError), worker_errors(WORKER):
            async with asyncio.timeout(SEND_SECONDS), self._turn:
                await self._open().write(request)

    async def close(self) -> None:
        """Closes the stream. Idempotent."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait((self._reader,))

    def _open(self) -> Any:
        if self._call is None or self._call.done():
            self._call = self._stub.Announce(timeout=STREAM_SECONDS)
            self._reader = asyncio.create_task(self._read(self._call))
        return self._call

    async def _read(self, call: Any) -> None:
        with suppress(WorkerCallError), worker_errors(WORKER):
            async for first in call:
                token = self._expected.get(first.request_id)
                if token is not None and not token.done():  # it may come twice, or too late
                    token.set_result(first)
