"""A gateway process's connections to the others, and its questions to them other than claims of ids."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.peers.hosts import PEER_NAME, GatewayHost, GatewayHosts
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.proto import admin_pb2, inference_pb2, peer_pb2, peer_pb2_grpc
from tandem.workers.ports.authentication import authorized
from tandem.workers.ports.private_socket import private_target
from tandem.workers.ports.tls import Identity

TRACE_SECONDS = 2.0  # for each process that is asked
GIVE_WAY_SECONDS = 1.0  # for each process that is asked
GATEWAYS_SECONDS = 2.0  # for each host
PLACED_SECONDS = 1.0  # for each host
KEYS_SECONDS = 0.5  # for each host
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 1000)]


class PeerLinks:
    """Channels, opened when first needed: to this host's processes by the numbers of their sockets, to other hosts' by
    HOST:PORT.

    Owned by the gateway's event loop.
    """

    def __init__(self, table: GatewayTable, token: str, identity: Identity | None = None, number: int = 0) -> None:
        """token: of all peers. identity: what other hosts are shown; None where there are none. number: of this host's
        gateway, see GatewayHost."""
        self._table = table
        self._token = token
        self._identity = identity
        self._number = number
        self._hosts = GatewayHosts()
        self._channels: dict[int | str, tuple[grpc.aio.Channel, peer_pb2_grpc.PeerStub]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def hosts(self) -> tuple[GatewayHost, ...]:
        """The other hosts that have gateways."""
        return self._hosts.without(self._number)

    def peers_of(self, number: int) -> tuple[str, ...]:
        """Returns HOST:PORT of each process of another host; empty if it has none any more."""
        return self._hosts.peers_of(number)

    def update_hosts(self, hosts: GatewayHosts) -> None:
        """Takes the hosts as the launcher knows them. Ignores a set that is older than the last."""
        if hosts.version > self._hosts.version:
            self._hosts = hosts

    def stub(self, peer: int | str) -> Any:
        """Returns the stub of this host's process with that socket number, or of the process at that other address."""
        if peer not in self._channels:
            there: set[int | str] = {self._table.of(other, Column.SOCKET) for other in self._table.others()}
            there.update(*(host.peers for host in self.hosts))
            for gone in self._channels.keys() - there:
                channel, _ = self._channels.pop(gone)
                closing = asyncio.create_task(channel.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            channel = self._open(peer)
            self._channels[peer] = channel, authorized(peer_pb2_grpc.PeerStub(channel), self._token)
        return self._channels[peer][1]

    def _open(self, peer: int | str) -> grpc.aio.Channel:
        if isinstance(peer, int):
            return grpc.aio.insecure_channel(private_target(peer), options=OPTIONS)
        assert self._identity is not None, "who knows other hosts has something to show them"
        named = [*OPTIONS, ("grpc.ssl_target_name_override", PEER_NAME)]
        return grpc.aio.secure_channel(peer, self._identity.channel_credentials(), options=named)

    async def give_way(self, client_column: int) -> bool:
        """Returns whether another process has ended a waiting request of that client. Asks where it has most, first."""
        having = [other for other in self._table.others() if self._table.of(other, client_column)]
        for other in sorted(having, key=lambda other: -self._table.of(other, client_column)):
            request = peer_pb2.GiveWayRequest(client=client_column)
            try:
                stub = self.stub(self._table.of(other, Column.SOCKET))
                if (await stub.GiveWay(request, timeout=GIVE_WAY_SECONDS)).gave_way:
                    return True
            except (grpc.aio.AioRpcError, grpc.aio.UsageError):
                continue  # it has ended, or is stopped
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
        return False

    async def find_trace(self, request: admin_pb2.GetTraceRequest) -> admin_pb2.GetTraceResponse:
        """Returns the trace from the first other process that has it; empty if none has."""
        for peer in self._all():
            try:
                answer = await self.stub(peer).GetTrace(request, timeout=TRACE_SECONDS)
            except (grpc.aio.AioRpcError, grpc.aio.UsageError):
                continue
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                continue
            if answer.HasField("trace"):
                return answer
        return admin_pb2.GetTraceResponse()

    async def gateways(self) -> list[inference_pb2.GatewayProcessInfo]:
        """Returns the gateways of all other hosts, asked at once. A silent host counts as one, without a pid."""
        found = await asyncio.gather(*map(self._gateways_of, self.hosts))
        return [gateway for gateways in found for gateway in gateways]

    async def _gateways_of(self, host: GatewayHost) -> list[inference_pb2.GatewayProcessInfo]:
        request = peer_pb2.GetGatewaysRequest()
        answer = await self._first(host, lambda stub: stub.GetGateways(request, timeout=GATEWAYS_SECONDS))
        return [inference_pb2.GatewayProcessInfo(host=host.address)] if answer is None else [*answer.gateways]

    async def placed(self) -> list[tuple[Int64Array, Int64Array]]:
        """Asks each other host what it has placed: cells of GatewayTable.placed, and the tokens in each."""
        request = peer_pb2.GetPlacedRequest()
        asked = (self._first(host, lambda stub: stub.GetPlaced(request, timeout=PLACED_SECONDS)) for host in self.hosts)
        found = [one for one in await asyncio.gather(*asked) if one is not None]
        return [(np.array(one.cells, np.int64), np.array(one.tokens, np.int64)) for one in found]

    async def key_counts(self) -> list[tuple[int, peer_pb2.GetKeyCountsResponse]]:
        """Returns the counts of callers' keys on each other host that answers, by the host's number."""
        request, hosts = peer_pb2.GetKeyCountsRequest(), self.hosts
        asked = (self._first(host, lambda stub: stub.GetKeyCounts(request, timeout=KEYS_SECONDS)) for host in hosts)
        answers = zip(hosts, await asyncio.gather(*asked), strict=True)
        return [(host.number, answer) for host, answer in answers if answer is not None]

    async def _first(self, host: GatewayHost, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Returns the answer of the host's first process. None if there is no process, or one is silent: then its host
        most likely is, too."""
        for peer in host.peers:
            try:
                return await ask(self.stub(peer))
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    return None
            except grpc.aio.UsageError:
                continue  # its channel is being closed
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
        return None

    def turn(self, process: int, processes: int) -> tuple[int, int]:
        """Returns a process's number among the processes of all hosts, if each has `processes`, and their count."""
        numbers = sorted({self._number, *(host.number for host in self.hosts)})
        return numbers.index(self._number) * processes + process, len(numbers) * processes

    def _all(self) -> list[int | str]:
        """All other processes, this host's first."""
        near = [self._table.of(other, Column.SOCKET) for other in self._table.others()]
        return [*near, *(peer for host in self.hosts for peer in host.peers)]

    async def close(self) -> None:
        await asyncio.gather(*self._closing, *(channel.close() for channel, _ in self._channels.values()))


def is_cancelled() -> bool:
    """Returns whether this task is cancelled. If not, only its call was: stub() has closed the channel of a process
    that is gone, while an answer was awaited over it."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
