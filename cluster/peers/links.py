"""A gateway process's connections to the others, and what it asks of them besides ids."""

import asyncio
from typing import Any

import grpc.aio

from tandem.cluster.peers.table import Column, GatewayTable
from tandem.proto import admin_pb2, peer_pb2, peer_pb2_grpc
from tandem.workers.authentication import authorized

TRACE_SECONDS = 2.0  # for each process that is asked
GIVE_WAY_SECONDS = 1.0  # for each process that is asked


class PeerLinks:
    """Channels by port, opened when first needed. Owned by the gateway's event loop."""

    def __init__(self, table: GatewayTable, token: str) -> None:
        """token: of all peers."""
        self._table = table
        self._token = token
        self._channels: dict[int, tuple[grpc.aio.Channel, peer_pb2_grpc.PeerStub]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def stub(self, port: int) -> Any:
        """Of the process that listens there."""
        if port not in self._channels:
            there = {self._table.of(other, Column.PORT) for other in self._table.others()}
            for gone in self._channels.keys() - there:
                channel, _ = self._channels.pop(gone)
                closing = asyncio.create_task(channel.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)])
            self._channels[port] = channel, authorized(peer_pb2_grpc.PeerStub(channel), self._token)
        return self._channels[port][1]

    async def give_way(self, client_column: int) -> bool:
        """Whether another process has ended a waiting request of that client. Those that have most are asked first."""
        having = [other for other in self._table.others() if self._table.of(other, client_column)]
        for other in sorted(having, key=lambda other: -self._table.of(other, client_column)):
            request = peer_pb2.GiveWayRequest(client=client_column)
            try:
                stub = self.stub(self._table.of(other, Column.PORT))
                if (await stub.GiveWay(request, timeout=GIVE_WAY_SECONDS)).gave_way:
                    return True
            except (grpc.aio.AioRpcError, grpc.aio.UsageError):
                continue  # it has ended, or is stopped
        return False

    async def find_trace(self, request: admin_pb2.GetTraceRequest) -> admin_pb2.GetTraceResponse:
        """Of the first other process that has it; empty where none has."""
        for other in self._table.others():
            try:
                stub = self.stub(self._table.of(other, Column.PORT))
                answer = await stub.GetTrace(request, timeout=TRACE_SECONDS)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError):
                continue
            if answer.HasField("trace"):
                return answer
        return admin_pb2.GetTraceResponse()

    async def close(self) -> None:
        await asyncio.gather(*self._closing, *(channel.close() for channel, _ in self._channels.values()))
