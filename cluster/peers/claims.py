"""Takes a request's id over from the gateway's other processes, before a call of that id begins in this one."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio

from tandem.cluster.errors import InvalidRequest, Superseded
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.proto import peer_pb2

ANSWER_SECONDS = 1.0  # how long a call waits for a process that may run its id
CLAIM_SECONDS = 60.0  # how long that process is asked: one that was stopped still ends its call when it goes on
AGAIN_SECONDS = 0.05  # after a claim that did not arrive


@dataclass(frozen=True)
class Claim:
    """One call of a request id. stamp: when it began, in monotonic nanoseconds; of two calls, that decides."""

    request_id: str
    resumes: bool
    stamp: int


class Claims:
    """Asks the other processes. Owned by the gateway's event loop.

    Only processes in whose row the id's cell counts something are asked: for most requests none is.
    """

    def __init__(self, table: GatewayTable, links: PeerLinks) -> None:
        self._table = table
        self._links = links
        self._asking: set[asyncio.Task[int]] = set()

    def holders(self, request_id: str) -> list[int]:
        """The processes that may run a request of that id. Its own cell counts it before this looks: of two processes
        that begin an id at once, one sees the other."""
        column = self._table.id_column(request_id)
        return [other for other in self._table.others() if self._table.of(other, column)]

    async def take(self, claim: Claim, holders: list[int]) -> None:
        """Returns when none of `holders` runs the id any more. A process that does not answer is not waited for long:
        what it sends goes to a client that has left it.

        InvalidRequest: it is in use. Superseded: a later call has resumed it.
        """
        questions = [asyncio.create_task(self._ask(claim, holder)) for holder in holders]
        for question in questions:
            self._asking.add(question)
            question.add_done_callback(self._asking.discard)
        done, _ = await asyncio.wait(questions, timeout=ANSWER_SECONDS)
        outcomes = {question.result() for question in done}
        if peer_pb2.CLAIM_OUTCOME_IN_USE in outcomes:
            raise in_use(claim.request_id)
        if peer_pb2.CLAIM_OUTCOME_SUPERSEDED in outcomes:
            raise superseded(claim.request_id)

    def close(self) -> None:
        for question in self._asking:
            question.cancel()

    async def _ask(self, claim: Claim, holder: int) -> int:
        """The outcome. Asks until there is one, the process has ended, or the time is over."""
        request = peer_pb2.ClaimRequest(request_id=claim.request_id, resumes=claim.resumes, stamp=claim.stamp)
        column, port = self._table.id_column(claim.request_id), self._table.of(holder, Column.PORT)
        with suppress(TimeoutError):
            async with asyncio.timeout(CLAIM_SECONDS):
                while port and self._table.of(holder, Column.PORT) == port and self._table.of(holder, column):
                    try:
                        return (await self._links.stub(port).Claim(request, timeout=CLAIM_SECONDS)).outcome
                    except (grpc.aio.AioRpcError, grpc.aio.UsageError):
                        await asyncio.sleep(AGAIN_SECONDS)
        return peer_pb2.CLAIM_OUTCOME_FREE


def in_use(request_id: str) -> InvalidRequest:
    return InvalidRequest(f"request_id {request_id!r} is in use by a request that still runs")


def superseded(request_id: str) -> Superseded:
    return Superseded(f"a later call has taken request_id {request_id!r} over")
