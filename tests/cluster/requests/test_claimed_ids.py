"""Calls of one id in several gateway processes: at most one runs, and a later one that resumes takes it over."""

import asyncio
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.cluster.errors import InvalidRequest, Superseded
from tandem.cluster.peers.claims import Claim, Claims
from tandem.cluster.peers.links import PeerLinks
from tandem.cluster.peers.peer_server import PeerServer
from tandem.cluster.peers.table import Column, GatewayTable, table_bytes
from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.validation import ModelLimits, RequestValidator
from tandem.proto import inference_pb2, peer_pb2

TOKEN = "a token of all processes"
LIMITS = ModelLimits(vocab_size=100, max_model_len=100, pool_tokens=100)
FREE, IN_USE, SUPERSEDED = (
    peer_pb2.CLAIM_OUTCOME_FREE,
    peer_pb2.CLAIM_OUTCOME_IN_USE,
    peer_pb2.CLAIM_OUTCOME_SUPERSEDED,
)
EARLIER, LATER = 1, 1 << 62


def claim(stamp: int, *, resumes: bool = False) -> Claim:
    return Claim("one", resumes, stamp, origin=1)


@dataclass
class HeldRouter:
    """Finds no place, as where no worker has room."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def place(self, *arguments: Any, **options: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


@dataclass
class Process:
    """A gateway process, and another one, which answers claims with `outcome` once `answers` is set."""

    table: GatewayTable
    other: GatewayTable
    requests: ActiveRequests
    router: HeldRouter
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    outcome: peer_pb2.ClaimOutcome = FREE

    def serve(self, *, resumes: bool = False) -> "asyncio.Future[None]":
        message = inference_pb2.GenerateRequest(request_id="one")
        message.token_ids.ids.append(5)
        message.sampling.max_tokens = 4
        if resumes:
            message.resume.SetInParent()

        async def write(response: inference_pb2.GenerateResponse) -> None:
            raise AssertionError(f"{response} was made without a place")

        return asyncio.ensure_future(self.requests.serve(message, "client", write))

    def other_may_run_it(self) -> None:
        self.other.add(self.other.id_column("one"), 1)

    @property
    def counted(self) -> int:
        return self.table.own(self.table.id_column("one"))

    async def give(self, asked: Claim) -> peer_pb2.ClaimOutcome:
        self.asked.set()
        await self.answers.wait()
        return self.outcome


@asynccontextmanager
async def processes() -> AsyncIterator[Process]:
    memory, router = mmap.mmap(-1, table_bytes(2, 1)), HeldRouter()
    table, other = (GatewayTable(memory, 2, 1, number) for number in range(2))
    links = PeerLinks(table, TOKEN)
    claims = Claims(table, links)
    parts: list[Any] = [RequestValidator(LIMITS, None), None, router, None, (), table, claims]  # no reader is asked
    requests = ActiveRequests(*parts, max_attempts=1, request_seconds=60.0)
    process = Process(table, other, requests, router)
    server = PeerServer(TOKEN, process.give, lambda client: False, lambda request_id: None)
    other.put(Column.SOCKET, await server.start())
    try:
        yield process
    finally:
        claims.close()
        await links.close()
        await server.stop()


def run(test: Callable[[Process], Awaitable[None]]) -> None:
    async def alone() -> None:
        async with processes() as process:
            await asyncio.wait_for(test(process), 60)

    asyncio.run(alone())


async def end(call: "asyncio.Future[None]") -> None:
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call


def test_a_call_counts_while_it_runs_and_is_not_given_to_one_that_begins() -> None:
    async def test(process: Process) -> None:
        call = process.serve()
        await process.router.asked.wait()
        assert process.counted == 1
        assert await process.requests.give(claim(LATER)) == IN_USE
        assert await process.requests.give(claim(EARLIER)) == IN_USE
        assert process.requests.running == 1
        await end(call)
        assert process.counted == 0
        assert await process.requests.give(claim(LATER)) == FREE

    run(test)


def test_nothing_is_placed_before_the_other_process_has_answered() -> None:
    async def test(process: Process) -> None:
        process.other_may_run_it()
        call = process.serve()
        await process.asked.wait()
        assert not process.router.asked.is_set()
        process.answers.set()
        await process.router.asked.wait()
        await end(call)

    run(test)


@pytest.mark.parametrize(("outcome", "error"), [(IN_USE, InvalidRequest), (SUPERSEDED, Superseded)])
def test_what_runs_elsewhere_is_refused(outcome: peer_pb2.ClaimOutcome, error: type[Exception]) -> None:
    async def test(process: Process) -> None:
        process.other_may_run_it()
        process.outcome = outcome
        process.answers.set()
        call, placed = process.serve(), asyncio.ensure_future(process.router.asked.wait())
        await asyncio.wait((call, placed), return_when=asyncio.FIRST_COMPLETED)
        assert not process.router.asked.is_set()
        with pytest.raises(error, match="'one'"):
            await call
        assert process.counted == 0
        placed.cancel()

    run(test)


def test_of_two_that_begin_at_once_the_earlier_goes_on() -> None:
    """Each asks the other before either knows that it goes on."""

    async def test(process: Process) -> None:
        process.other_may_run_it()
        call = process.serve()
        await process.asked.wait()
        assert await process.requests.give(claim(LATER)) == IN_USE
        assert await process.requests.give(claim(EARLIER)) == FREE
        await end(call)

    run(test)


def test_a_later_call_that_resumes_ends_the_one_that_runs() -> None:
    async def test(process: Process) -> None:
        call = process.serve()
        await process.router.asked.wait()
        assert await process.requests.give(claim(LATER, resumes=True)) == FREE
        assert (process.requests.running, process.counted) == (0, 0)
        with pytest.raises(Superseded):
            await asyncio.wait_for(call, 10)

    run(test)


def test_an_earlier_resume_does_not_end_a_later_one() -> None:
    """It comes late, perhaps from a client that has left since."""

    async def test(process: Process) -> None:
        call = process.serve(resumes=True)
        await process.router.asked.wait()
        assert await process.requests.give(claim(EARLIER, resumes=True)) == SUPERSEDED
        assert process.requests.running == 1
        await end(call)

    run(test)
