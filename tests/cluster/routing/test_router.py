"""Tests a router's duties to workers: pages are given back, after the sender's answer if there is a sender."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tandem.cluster.errors import DeadlineExceeded
from tandem.cluster.routing.admission import AdmissionQueue
from tandem.cluster.routing.islands import Islands, LinkPair
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.policy import POLICIES
from tandem.cluster.routing.router import Placement, Router
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.proto import worker_pb2
from tandem.workers.config import Role
from tandem.workers.wire.prompt_spec import PromptSpec
from tests.cluster.fake_worker import FakeWorker

PREFILL, DECODE, OTHER_DECODE = range(3)
PROMPT = np.array([5, 6, 7])
MAX_TOKENS = 4

Event = tuple[int, str, bool]
"""The PE of a worker, what it has answered, and for an Abort whether the writer was said to be quiet."""


@dataclass
class LoggedWorker(FakeWorker):
    """Writes its answers into a log that all workers share. stays: until it is set, an Abort is not answered."""

    log: list[Event] = field(default_factory=list)
    number: int = 0
    stays: asyncio.Event | None = None
    asked_to_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def PrepareReceive(self, request: worker_pb2.PrepareReceiveRequest, context: Any) -> worker_pb2.Reservation:
        reservation = await super().PrepareReceive(request, context)
        self.log.append((self.number, "reserved", False))
        return reservation

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        self.asked_to_end.set()
        if self.stays is not None:
            await self.stays.wait()
        response = await super().Abort(request, context)
        self.log.append((self.number, "ended", request.writer_quiet))
        return response


@dataclass
class Setting:
    router: Router
    islands: Islands
    workers: Sequence[LoggedWorker]
    log: list[Event]

    async def place(self, near: LinkPair | None = None) -> Placement:
        prompt = PromptSpec(PROMPT, whole=True)  # no hint goes ahead
        return await self.router.place("r", prompt, MAX_TOKENS, "client", near=near)

    @property
    def loads(self) -> list[int]:
        return [link.load for link in self.islands.links().values()]


@asynccontextmanager
async def setting(num_decodes: int = 1, queue_seconds: float = 20.0) -> AsyncIterator[Setting]:
    """A router before an island of one prefill worker and some decode workers."""
    log: list[Event] = []
    workers = [LoggedWorker(lambda sequence: 7, log=log, number=number) for number in range(1 + num_decodes)]
    for worker in workers:
        await worker.start()
    addresses = tuple(
        WorkerAddress(Role.DECODE if pe else Role.PREFILL, pe, worker.address, "") for pe, worker in enumerate(workers)
    )
    islands = Islands(1 << 20, POLICIES["least_loaded"], 16)
    router = Router(islands, AdmissionQueue(8, 1 << 16), id_prefix="g/", queue_seconds=queue_seconds)
    try:
        await islands.update(IslandState("i", 1, restarts=0, workers=addresses, version=1))
        yield Setting(router, islands, workers, log)
    finally:
        await router.close()
        await islands.close()
        for worker in workers:
            await worker.stop()


def test_the_receiver_hears_of_an_end_after_the_sender_has_answered() -> None:
    """Before that the sender may write, and pages given back would be the next request's."""

    async def test() -> None:
        async with setting() as given:
            placement = await given.place()
            sender, receiver = given.workers
            sender.stays = asyncio.Event()
            giving = asyncio.ensure_future(given.router.give_back(placement, complete=False))
            await sender.asked_to_end.wait()
            assert not receiver.asked_to_end.is_set()
            sender.stays.set()
            await giving
            assert given.log == [(DECODE, "reserved", False), (PREFILL, "ended", False), (DECODE, "ended", True)]
            assert given.loads == [0, 0]

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_receiver_is_not_told_that_a_sender_is_quiet_which_did_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.routing.router.ABORT_AGAIN_SECONDS", 0.0)

    async def test() -> None:
        async with setting() as given:
            placement = await given.place()
            given.workers[PREFILL].fails["Abort"] = ["UNAVAILABLE"]
            await given.router.give_back(placement, complete=False)
            ends = [event for event in given.log if event[1] == "ended"]
            assert ends == [(DECODE, "ended", False), (PREFILL, "ended", False), (DECODE, "ended", True)]

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_request_that_is_complete_ends_no_workers_call() -> None:
    async def test() -> None:
        async with setting() as given:
            placement = await given.place()
            await given.router.give_back(placement, complete=True)
            assert given.log == [(DECODE, "reserved", False)]
            assert given.loads == [0, 0]

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_reservation_that_comes_when_its_client_has_left_is_given_back_behind_it() -> None:
    """An Abort that came before the reservation would find nothing, and the pages would wait for their lease."""

    async def test() -> None:
        async with setting() as given:
            receiver = given.workers[DECODE]
            receiver.room = asyncio.Event()
            placing = asyncio.ensure_future(given.place())
            while not given.loads[DECODE]:
                await asyncio.sleep(0)
            placing.cancel()
            await asyncio.wait([placing])
            assert given.loads == [0, 0]
            await given.islands.links()["i", DECODE].status()  # behind an Abort that was sent already
            assert not receiver.asked_to_end.is_set()
            receiver.room.set()
            await given.router.close()
            assert given.log == [(DECODE, "reserved", False), (DECODE, "ended", True)]

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_reservation_whose_answer_was_lost_is_given_back_and_another_worker_asked() -> None:
    async def test() -> None:
        async with setting(num_decodes=2) as given:
            given.workers[DECODE].fails["PrepareReceive"] = ["UNAVAILABLE"]
            placement = await given.place()
            assert placement.decode.pe == OTHER_DECODE
            await given.router.close()
            assert sorted(given.log) == [(DECODE, "ended", True), (OTHER_DECODE, "reserved", False)]
            assert given.loads == [len(PROMPT), 0, len(PROMPT) + MAX_TOKENS]

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_request_does_not_go_near_a_worker_that_cannot_be_reached() -> None:
    """Its answers were to share the KV on that worker, and it would wait in vain."""

    async def test() -> None:
        async with setting(num_decodes=2) as given:
            links = given.islands.links()
            near = LinkPair(links["i", DECODE], links["i", PREFILL], 0.0)
            assert (await given.place(near)).decode.pe == DECODE
            near.decode.avoid()
            assert (await given.place(near)).decode.pe == OTHER_DECODE

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_worker_without_room_counts_nothing_of_the_request() -> None:
    async def test() -> None:
        async with setting(queue_seconds=0.0) as given:
            given.workers[DECODE].fails["PrepareReceive"] = ["RESOURCE_EXHAUSTED"] * 8
            with pytest.raises(DeadlineExceeded, match="no decode worker had room"):
                await given.place()
            assert given.loads == [0, 0]

    asyncio.run(asyncio.wait_for(test(), 60))
