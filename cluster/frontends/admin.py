"""tandem.v1.Admin: takes scale orders, and keeps each until the island's supervisor answers. Answers with metrics."""

import asyncio
import itertools
from dataclasses import asdict

import grpc.aio

from tandem.cluster.errors import DeadlineExceeded, InvalidRequest, TandemError
from tandem.cluster.errors.statuses import refuse
from tandem.cluster.metrics.scrape import Scrape
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.scaling import MAX_WORKERS, ScaleOrder, ScaleOutcome
from tandem.cluster.tracing.request_trace import Tracer
from tandem.proto import admin_pb2, admin_pb2_grpc

SCALE_SECONDS = 900.0
POLL_SECONDS = 10.0


class Admin(admin_pb2_grpc.AdminServicer):
    """Owned by the gateway's event loop, which runs all of its methods."""

    def __init__(self, scrape: Scrape | None, tracer: Tracer, links: PeerLinks, *, adaptive: bool) -> None:
        """scrape: None where nothing is counted. adaptive: whether any worker may compute prompts."""
        self._scrape = scrape
        self._tracer = tracer
        self._links = links
        self._fewest = {"num_prefill": 0 if adaptive else 1, "num_decode": 1}
        self._numbers = itertools.count(1)
        self._orders: asyncio.Queue[ScaleOrder | None] = asyncio.Queue()
        self._outcomes: dict[int, asyncio.Future[ScaleOutcome]] = {}

    async def Scale(
        self, request: admin_pb2.ScaleRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ScaleResponse:
        try:
            order = self._order(request)
        except InvalidRequest as error:
            await refuse(context, error)
        outcome = self._outcomes[order.number] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait(order)
        try:
            return _response(await asyncio.wait_for(outcome, SCALE_SECONDS))
        except TimeoutError:
            await refuse(context, DeadlineExceeded(f"no answer within {SCALE_SECONDS:g} s"))
        except TandemError as error:
            await refuse(context, error)
        finally:
            del self._outcomes[order.number]

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

    async def next_order(self) -> ScaleOrder | None:
        """The next order whose caller still waits. None after POLL_SECONDS without one, and after close()."""
        try:
            async with asyncio.timeout(POLL_SECONDS):
                while (order := await self._orders.get()) is not None and order.number not in self._outcomes:
                    pass  # its caller has gone, and nothing was begun
                return order
        except TimeoutError:
            return None

    def answer(self, number: int, outcome: ScaleOutcome | TandemError) -> None:
        """Gives an order's outcome to its caller, if the caller still waits."""
        waiting = self._outcomes.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, ScaleOutcome):
            waiting.set_result(outcome)
        else:
            waiting.set_exception(outcome)

    def close(self) -> None:
        """next_order() returns None."""
        self._orders.put_nowait(None)

    def _order(self, request: admin_pb2.ScaleRequest) -> ScaleOrder:
        wanted: dict[str, int | None] = {}
        for name, fewest in self._fewest.items():
            wanted[name] = number = getattr(request, name) if request.HasField(name) else None
            if number is not None and not fewest <= number <= MAX_WORKERS:
                alone = name == "num_prefill" and number == 0
                hint = "; 0 is, where scheduler.roles is adaptive or colocated" if alone else ""
                raise InvalidRequest(f"{name} is {number}; {fewest} … {MAX_WORKERS} are accepted{hint}")
        shaped = any(number is not None for number in wanted.values())
        if request.HasField("num_islands"):
            if shaped or request.island:
                raise InvalidRequest("num_islands must be alone, without island, num_prefill and num_decode")
            return ScaleOrder(next(self._numbers), "", None, None, request.num_islands)
        if not shaped:
            raise InvalidRequest("num_prefill, num_decode and num_islands are missing; give one or both, or the last")
        return ScaleOrder(next(self._numbers), request.island, **wanted)


def _response(outcome: ScaleOutcome) -> admin_pb2.ScaleResponse:
    fields = asdict(outcome)
    return admin_pb2.ScaleResponse(**fields.pop("shape"), **fields)
