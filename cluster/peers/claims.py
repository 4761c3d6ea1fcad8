"""Takes a request's id over from the other gateway processes, before a call of that id begins in this one."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc.aio

from tandem.cluster.errors import InvalidRequest, Superseded
from tandem.cluster.peers.claim_clock import ClaimClock
from tandem.cluster.peers.hosts import GatewayHost
from tandem.cluster.peers.links import PeerLinks, is_cancelled
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.proto import peer_pb2

ANSWER_SECONDS = 1.0  # how long a call waits for a process that may run its id
CLAIM_SECONDS = 60.0  # how long that process is asked: one that was stopped still ends its call when it goes on
MOST_ASKING = 4096  # questions for so long; beyond it they end with the call's own wait
AGAIN_SECONDS = 0.05  # after a claim that did not arrive
SCOPE = "\0"  # between a request's id and its caller's key
HOST_SECONDS = 5.0  # how long one process is asked for its whole host, before the next one is


Holder = int | GatewayHost
"""A process of this host, by its number, or another host."""


@dataclass(frozen=True)
class Claim:
    """One call of a request id. stamp: ClaimClock.next(), which decides between two. origin: of its process."""

    request_id: str
    resumes: bool
    stamp: int
    origin: int = 0

    def is_after(self, other: "Claim") -> bool:
        return (self.stamp, self.origin) > (other.stamp, other.origin)


class Claims:
    """Asks the other processes. Owned by the gateway's event loop.

    On this host it asks only the processes whose row counts something in the id's cell: for most requests none does.
    Other hosts have tables of their own. A call that resumes asks one process of each, for its whole host.
    """

    def __init__(self, table: GatewayTable, links: PeerLinks) -> None:
        self._table = table
        self._links = links
        self.clock = ClaimClock(table)
        self._asking: set[asyncio.Task[peer_pb2.ClaimOutcome]] = set()

    def holders(self, request_id: str) -> list[int]:
        """The processes that may run a request of that id. Its own cell counts it before this looks: of two processes
        that begin an id at once, one sees the other."""
        column = self._table.id_column(request_id)
        return [other for other in self._table.others() if self._table.of(other, column)]

    def asked(self, claim: Claim) -> Sequence[Holder]:
        """Returns the processes that a call asks before it begins: holders(), and the other hosts if it resumes a
        request."""
        hosts = self._links.hosts if claim.resumes else ()
        return [*self.holders(claim.request_id), *hosts]

    async def take(self, claim: Claim, holders: Sequence[Holder]) -> None:
        """Returns when none of `holders` runs the id any more. A process that does not answer is not waited for long:
        what it sends goes to a client that has left it.

        Raises InvalidRequest if the id is in use, and Superseded if a later call has resumed it.
        """
        outcome = await self.outcome(claim, holders)
        if outcome == peer_pb2.CLAIM_OUTCOME_IN_USE:
            raise in_use(claim.request_id)
        if outcome == peer_pb2.CLAIM_OUTCOME_SUPERSEDED:
            raise superseded(claim.request_id)

    async def outcome(self, claim: Claim, holders: Sequence[Holder]) -> peer_pb2.ClaimOutcome:
        """Returns the outcome of take() as a value: the first of the reasons why the id is not free."""
        seconds = CLAIM_SECONDS if len(self._asking) < MOST_ASKING else ANSWER_SECONDS
        questions = [asyncio.create_task(self._ask_in_time(claim, holder, seconds)) for holder in holders]
        for question in questions:
            self._asking.add(question)
            question.add_done_callback(self._asking.discard)
        done, _ = await asyncio.wait(questions, timeout=ANSWER_SECONDS)
        outcomes = {question.result() for question in done}
        reasons = (peer_pb2.CLAIM_OUTCOME_IN_USE, peer_pb2.CLAIM_OUTCOME_SUPERSEDED)
        return next((reason for reason in reasons if reason in outcomes), peer_pb2.CLAIM_OUTCOME_FREE)

    def close(self) -> None:
        for question in self._asking:
            question.cancel()

    async def _ask_in_time(self, claim: Claim, holder: Holder, seconds: float) -> peer_pb2.ClaimOutcome:
        """Returns the outcome. Asks until there is one, the process or host has ended, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if isinstance(holder, GatewayHost):
                    return await self._ask_host(claim, holder.number)
                return await self._ask(claim, holder)
        return peer_pb2.CLAIM_OUTCOME_FREE

    async def _ask_host(self, claim: Claim, number: int) -> peer_pb2.ClaimOutcome:
        """Returns the outcome on another host. Asks its processes in turn."""
        request, pause = _request(claim, whole_host=True), AGAIN_SECONDS
        while peers := self._links.peers_of(number):
            for peer in peers:
                try:
                    return (await self._links.stub(peer).Claim(request, timeout=HOST_SECONDS)).outcome
                except (grpc.aio.AioRpcError, grpc.aio.UsageError):
                    continue
                except asyncio.CancelledError:
                    if is_cancelled():
                        raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, HOST_SECONDS)  # a lost host's streams are all resumed at once
        return peer_pb2.CLAIM_OUTCOME_FREE

    async def _ask(self, claim: Claim, holder: int) -> peer_pb2.ClaimOutcome:
        """Returns the outcome in a process of this host."""
        request = _request(claim)
        column, there = self._table.id_column(claim.request_id), self._table.of(holder, Column.SOCKET)
        while there and self._table.of(holder, Column.SOCKET) == there and self._table.of(holder, column):
            try:
                return (await self._links.stub(there).Claim(request, timeout=CLAIM_SECONDS)).outcome
            except (grpc.aio.AioRpcError, grpc.aio.UsageError):
                await asyncio.sleep(AGAIN_SECONDS)
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
        return peer_pb2.CLAIM_OUTCOME_FREE


def _request(claim: Claim, *, whole_host: bool = False) -> peer_pb2.ClaimRequest:
    return peer_pb2.ClaimRequest(
        request_id=claim.request_id,
        resumes=claim.resumes,
        stamp=claim.stamp,
        whole_host=whole_host,
        origin=claim.origin,
    )


def in_use(request_id: str) -> InvalidRequest:
    return InvalidRequest(f"request_id {_given(request_id)!r} is in use by a request that still runs")


def superseded(request_id: str) -> Superseded:
    return Superseded(f"a later call has taken request_id {_given(request_id)!r} over")


def _given(request_id: str) -> str:
    """Returns the id as its client knows it."""
    return request_id.partition(SCOPE)[0]
