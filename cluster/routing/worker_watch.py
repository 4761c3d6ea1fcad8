"""Watches the reports of one worker, for as long as the gateway has a connection to it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from tandem.cluster.errors import WorkerCallError
from tandem.cluster.errors.statuses import worker_errors
from tandem.proto import worker_pb2, worker_pb2_grpc

STREAM_SECONDS = 86400.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0

Take = Callable[[worker_pb2.WorkerReport], None]


class WorkerWatch:
    """The gRPC stream of Worker/Watch. When it ends it is opened again, with growing pauses if that fails.

    Reports are hints, so nothing here fails. Used on the event loop of its stub.
    """

    def __init__(self, stub: worker_pb2_grpc.WorkerStub, epoch: int, take: Take, lose: Callable[[], None]) -> None:
        """take: gets each report. lose: called once after reports, when they hold no longer."""
        self._stub = stub
        self._request = worker_pb2.WatchRequest(epoch=epoch)
        self._take = take
        self._lose = lose
        self._reported = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def end(self) -> None:
        """Ends the watch. Earlier reports are void. Idempotent."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()
            self._void()

    async def close(self) -> None:
        """Ends the watch like end(), and returns when the gRPC stream has ended."""
        self.end()
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            await self._read()
            if self._reported:
                pause = FIRST_PAUSE_SECONDS
            self._void()
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _read(self) -> None:
        """Reads one stream to its end."""
        with suppress(WorkerCallError), worker_errors("the worker"):
            async for report in self._stub.Watch(self._request, timeout=STREAM_SECONDS):
                self._reported = True
                self._take(report)

    def _void(self) -> None:
        if self._reported:
            self._reported = False
            self._lose()
