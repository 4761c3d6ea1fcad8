"""/status: what GetClusterInfo says, as `tandem status --json` prints it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.json_format import MessageToDict

from tandem.cluster.frontends.http.reply import Receive, Reply, Scope
from tandem.proto import inference_pb2

FRESH_SECONDS = 0.2  # for which one answer serves all that ask


class Status:
    """Owned by the gateway's event loop. Workers are asked once at a time, however many callers there are."""

    def __init__(self, cluster: Callable[[], Awaitable[inference_pb2.ClusterInfo]]) -> None:
        """cluster: asks the workers."""
        self._cluster = cluster
        self._made = 0.0
        self._making: asyncio.Task[dict[str, Any]] | None = None

    async def serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        now = asyncio.get_running_loop().time()
        if self._making is None or (self._making.done() and now - self._made >= FRESH_SECONDS):
            self._making = asyncio.create_task(self._make())
        value = await asyncio.shield(self._making)
        await reply.whole(200, value, {"cache-control": "no-store"})

    async def _make(self) -> dict[str, Any]:
        info = await self._cluster()
        self._made = asyncio.get_running_loop().time()
        # With many workers it takes milliseconds, in which no stream must wait.
        return await asyncio.to_thread(
            MessageToDict, info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
