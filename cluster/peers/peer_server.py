"""The server by which a gateway process hears from the others: on its own socket, and at its host's address from other
hosts."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
import numpy as np

from tandem.cache.plan.arrays import Int64Array
from tandem.cluster.errors import StartFailed
from tandem.cluster.peers.claims import Claim
from tandem.cluster.peers.key_counts import KeyCounts
from tandem.proto import admin_pb2, inference_pb2, peer_pb2, peer_pb2_grpc
from tandem.workers.ports.authentication import TokenRequired
from tandem.workers.ports.connections import lenient_options
from tandem.workers.ports.private_socket import PrivateSocket
from tandem.workers.ports.tls import Identity, bracketed
from tandem.workers.service.well_formed import WellFormedRequired

HOST = "127.0.0.1"
MESSAGE_BYTES = 1 << 16
OPTIONS = (("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.so_reuseport", 0), *lenient_options())

Give = Callable[[Claim], Awaitable["peer_pb2.ClaimOutcome"]]
GiveWay = Callable[[int], bool]
Find = Callable[[str], admin_pb2.Trace | None]


@dataclass(frozen=True)
class Abroad:
    """The server for other hosts' processes, which must show a certificate of the authority of `identity`."""

    host: str  # the address of this one
    identity: Identity
    give_host: Give  # as PeerServer's give, of all processes of this host
    gateways: Callable[[], list[inference_pb2.GatewayProcessInfo]]  # these processes
    placed: Callable[[], Int64Array]  # GatewayTable.placed
    keys: Callable[[], KeyCounts] | None = None  # what keys have used on this host; None: there are none


class PeerServer(peer_pb2_grpc.PeerServicer):
    """Answers each claim with the result of `give`. Runs on the gateway's event loop."""

    def __init__(self, token: str, give: Give, give_way: GiveWay, find: Find, abroad: Abroad | None = None) -> None:
        """give_way: as AdmissionQueue.give_way. find: the trace of a request that has ended here. abroad: None where no
        other host has a gateway."""
        self._give = give
        self._give_way = give_way
        self._find = find
        self._abroad = abroad
        self.address = ""
        """HOST:PORT for other hosts, after start(); empty where there are none."""
        self._server = grpc.aio.server(options=OPTIONS, interceptors=[TokenRequired(token), WellFormedRequired()])
        peer_pb2_grpc.add_PeerServicer_to_server(self, self._server)

    async def start(self) -> int:
        """Returns the number of its socket for this host. Raises StartFailed if it cannot listen on the host's
        address."""
        self._socket = PrivateSocket(self._server)
        if self._abroad is not None:
            host, credentials = self._abroad.host, self._abroad.identity.server_credentials()
            try:
                far = self._server.add_secure_port(f"{bracketed(host)}:0", credentials)
            except RuntimeError as error:
                raise StartFailed(f"{host} cannot be listened on for gateways of other hosts: {error}") from error
            self.address = f"{bracketed(host)}:{far}"
        await self._server.start()
        return self._socket.number

    async def stop(self) -> None:
        await self._server.stop(0)
        self._socket.close()

    async def Claim(self, request: peer_pb2.ClaimRequest, context: grpc.aio.ServicerContext) -> peer_pb2.ClaimResponse:
        give = self._abroad.give_host if self._abroad and request.whole_host else self._give
        outcome = await give(Claim(request.request_id, request.resumes, request.stamp, request.origin))
        return peer_pb2.ClaimResponse(outcome=outcome)

    async def GiveWay(
        self, request: peer_pb2.GiveWayRequest, context: grpc.aio.ServicerContext
    ) -> peer_pb2.GiveWayResponse:
        return peer_pb2.GiveWayResponse(gave_way=self._give_way(request.client))

    async def GetTrace(
        self, request: admin_pb2.GetTraceRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetTraceResponse:
        return admin_pb2.GetTraceResponse(trace=self._find(request.request_id))

    async def GetGateways(
        self, request: peer_pb2.GetGatewaysRequest, context: grpc.aio.ServicerContext
    ) -> peer_pb2.GetGatewaysResponse:
        return peer_pb2.GetGatewaysResponse(gateways=self._abroad.gateways() if self._abroad else ())

    async def GetPlaced(
        self, request: peer_pb2.GetPlacedRequest, context: grpc.aio.ServicerContext
    ) -> peer_pb2.GetPlacedResponse:
        if self._abroad is None:
            return peer_pb2.GetPlacedResponse()
        placed = self._abroad.placed()
        cells = np.flatnonzero(placed)
        return peer_pb2.GetPlacedResponse(cells=cells, tokens=placed[cells])

    async def GetKeyCounts(
        self, request: peer_pb2.GetKeyCountsRequest, context: grpc.aio.ServicerContext
    ) -> peer_pb2.GetKeyCountsResponse:
        if self._abroad is None or self._abroad.keys is None:
            return peer_pb2.GetKeyCountsResponse()
        return self._abroad.keys().to_proto()
