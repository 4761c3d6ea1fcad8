"""The loopback port on which a gateway process hears from the others."""

from collections.abc import Awaitable, Callable

import grpc.aio

from tandem.cluster.peers.claims import Claim
from tandem.proto import admin_pb2, peer_pb2, peer_pb2_grpc
from tandem.workers.authentication import TokenRequired
from tandem.workers.connections import lenient_options
from tandem.workers.service.well_formed import WellFormedRequired

HOST = "127.0.0.1"
MESSAGE_BYTES = 1 << 16
OPTIONS = (("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.so_reuseport", 0), *lenient_options())

Give = Callable[[Claim], Awaitable["peer_pb2.ClaimOutcome"]]
GiveWay = Callable[[int], bool]
Find = Callable[[str], admin_pb2.Trace | None]


class PeerServer(peer_pb2_grpc.PeerServicer):
    """Answers claims with what `give` says of them. Runs on the gateway's event loop."""

    def __init__(self, token: str, give: Give, give_way: GiveWay, find: Find) -> None:
        """give_way: as AdmissionQueue.give_way. find: the trace of a request that has ended here."""
        self._give = give
        self._give_way = give_way
        self._find = find
        self._server = grpc.aio.server(options=OPTIONS, interceptors=[TokenRequired(token), WellFormedRequired()])
        peer_pb2_grpc.add_PeerServicer_to_server(self, self._server)

    async def start(self) -> int:
        """Its port, a free one."""
        port = self._server.add_insecure_port(f"{HOST}:0")
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Claim(self, request: peer_pb2.ClaimRequest, context: grpc.aio.ServicerContext) -> peer_pb2.ClaimResponse:
        outcome = await self._give(Claim(request.request_id, request.resumes, request.stamp))
        return peer_pb2.ClaimResponse(outcome=outcome)

    async def GiveWay(
        self, request: peer_pb2.GiveWayRequest, context: grpc.aio.ServicerContext
    ) -> peer_pb2.GiveWayResponse:
        return peer_pb2.GiveWayResponse(gave_way=self._give_way(request.client))

    async def GetTrace(
        self, request: admin_pb2.GetTraceRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetTraceResponse:
        return admin_pb2.GetTraceResponse(trace=self._find(request.request_id))
