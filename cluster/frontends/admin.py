"""tandem.v1.Admin: takes scale orders, and keeps each until the island's supervisor answers. Answers with metrics."""

from dataclasses import asdict

import grpc.aio

from tandem.cluster.errors import InvalidRequest, TandemError
from tandem.cluster.errors.statuses import refuse
from tandem.cluster.frontends.adapters.changes import AdapterChanges
from tandem.cluster.frontends.orders import Orders
from tandem.cluster.metrics.scrape import Scrape
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.scaling import MAX_WORKERS, ScaleOrder, ScaleOutcome
from tandem.cluster.tracing.request_trace import Tracer
from tandem.proto import admin_pb2, admin_pb2_grpc

SCALE_SECONDS = 900.0


class Admin(admin_pb2_grpc.AdminServicer):
    """Owned by the gateway's event loop, which runs all of its methods."""

    def __init__(
        self,
        scrape: Scrape | None,
        tracer: Tracer,
        links: PeerLinks,
        orders: Orders,
        adapters: AdapterChanges,
        *,
        adaptive: bool,
    ) -> None:
        """scrape: None where nothing is counted. adaptive: whether any worker may compute prompts."""
        self._scrape = scrape
        self._tracer = tracer
        self._links = links
        self._fewest = {"num_prefill": 0 if adaptive else 1, "num_decode": 1}
        self._orders = orders
        self._adapters = adapters

    async def Scale(
        self, request: admin_pb2.ScaleRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ScaleResponse:
        try:
            return _response(await self._orders.carry_out(self._order(request), SCALE_SECONDS))
        except TandemError as error:
            await refuse(context, error)

    async def GetMetrics(
        self, request: admin_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetMetricsResponse:
        if self._scrape is None:
            await refuse(context, InvalidRequest("metrics.enabled is false; GetMetrics answers where it is true"))
        return admin_pb2.GetMetricsResponse(text=(await self._scrape.text()).decode())

    async def GetTrace(
        self, request: admin_pb2.GetTraceRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetTraceResponse:
        trace = self._tracer.find(request.request_id)
        return await self._links.find_trace(request) if trace is None else admin_pb2.GetTraceResponse(trace=trace)

    async def AddAdapter(
        self, request: admin_pb2.AddAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ServedAdapter:
        try:
            return await self._adapters.add(request.name, request.path, load_inplace=request.load_inplace)
        except TandemError as error:
            await refuse(context, error)

    async def RemoveAdapter(
        self, request: admin_pb2.UnserveAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ServedAdapter:
        try:
            return await self._adapters.remove(request.name)
        except TandemError as error:
            await refuse(context, error)

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListAdaptersResponse:
        return admin_pb2.ListAdaptersResponse(adapters=await self._adapters.list())

    def _order(self, request: admin_pb2.ScaleRequest) -> ScaleOrder:
        wanted: dict[str, int | None] = {}
        for name, fewest in self._fewest.items():
            wanted[name] = number = getattr(request, name) if request.HasField(name) else None
            if number is not None and not fewest <= number <= MAX_WORKERS:
                alone = name == "num_prefill" and number == 0
                hint = ", or 0 where scheduler.roles is adaptive or colocated" if alone else ""
                raise InvalidRequest(f"{name} is {number}; it must be from {fewest} to {MAX_WORKERS}{hint}")
        shaped = any(number is not None for number in wanted.values())
        if request.HasField("num_islands"):
            if shaped or request.island:
                raise InvalidRequest("num_islands must be alone, without island, num_prefill and num_decode")
            return ScaleOrder(self._orders.next_number(), "", None, None, request.num_islands)
        if not shaped:
            raise InvalidRequest("num_prefill, num_decode and num_islands are missing; give one or both, or the last")
        return ScaleOrder(self._orders.next_number(), request.island, **wanted)


def _response(outcome: ScaleOutcome) -> admin_pb2.ScaleResponse:
    fields = asdict(outcome)
    return admin_pb2.ScaleResponse(**fields.pop("shape"), **fields)
