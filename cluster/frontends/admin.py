"""tandem.v1.Admin: takes orders at the gateway's door, and keeps them until the islands' supervisors have answered."""

import asyncio
import itertools
from collections.abc import Mapping

import grpc
import grpc.aio

from tandem.cluster.errors import InvalidRequest, ScaleRefused, TandemError
from tandem.cluster.scaling import MAX_WORKERS, ScaleOrder, ScaleOutcome
from tandem.proto import admin_pb2, admin_pb2_grpc

SCALE_SECONDS = 900.0
POLL_SECONDS = 10.0
STATUS_OF_ERROR: Mapping[type[TandemError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    ScaleRefused: grpc.StatusCode.FAILED_PRECONDITION,
}


class Admin(admin_pb2_grpc.AdminServicer):
    """Owned by the gateway's event loop, on which everything here runs."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._orders: asyncio.Queue[ScaleOrder | None] = asyncio.Queue()
        self._outcomes: dict[int, asyncio.Future[ScaleOutcome]] = {}

    async def Scale(
        self, request: admin_pb2.ScaleRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ScaleResponse:
        try:
            order = self._order(request)
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        outcome = self._outcomes[order.number] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait(order)
        try:
            return _response(await asyncio.wait_for(outcome, SCALE_SECONDS))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {SCALE_SECONDS:g} s")
        except TandemError as error:
            await context.abort(STATUS_OF_ERROR.get(type(error), grpc.StatusCode.INTERNAL), str(error))
        finally:
            del self._outcomes[order.number]

    async def next_order(self) -> ScaleOrder | None:
        """The next order that somebody still waits for; None when there was none for a while, or never will be."""
        try:
            async with asyncio.timeout(POLL_SECONDS):
                while (order := await self._orders.get()) is not None and order.number not in self._outcomes:
                    pass  # its caller has gone, and nothing was begun
                return order
        except TimeoutError:
            return None

    def answer(self, number: int, outcome: ScaleOutcome | TandemError) -> None:
        """What came of an order; nobody may wait for it any more."""
        waiting = self._outcomes.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, ScaleOutcome):
            waiting.set_result(outcome)
        else:
            waiting.set_exception(outcome)

    def close(self) -> None:
        """Whoever waits for an order is told that there is none."""
        self._orders.put_nowait(None)

    def _order(self, request: admin_pb2.ScaleRequest) -> ScaleOrder:
        wanted: dict[str, int | None] = {}
        for name in ("num_prefill", "num_decode"):
            wanted[name] = getattr(request, name) if request.HasField(name) else None
            if wanted[name] is not None and not 1 <= getattr(request, name) <= MAX_WORKERS:
                raise InvalidRequest(f"{name} is {wanted[name]}; an island has 1 … {MAX_WORKERS} workers of each role")
        if all(number is None for number in wanted.values()):
            raise InvalidRequest("num_prefill and num_decode are missing; give one or both")
        return ScaleOrder(next(self._numbers), request.island, **wanted)


def _response(outcome: ScaleOutcome) -> admin_pb2.ScaleResponse:
    return admin_pb2.ScaleResponse(
        island=outcome.island,
        epoch=outcome.epoch,
        num_prefill=outcome.shape.num_prefill,
        num_decode=outcome.shape.num_decode,
        kept=outcome.kept,
        started=outcome.started,
        ended=outcome.ended,
        seconds_away=outcome.seconds_away,
    )
