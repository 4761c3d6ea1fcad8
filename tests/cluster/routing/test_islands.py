"""Routing decisions see the workers as they are now, and look again only at those that have changed."""

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from tandem.cluster.peers.placed_tokens import PlacedTokens
from tandem.cluster.peers.table import GatewayTable, table_bytes
from tandem.cluster.routing import worker_link
from tandem.cluster.routing.cost_model import adaptive
from tandem.cluster.routing.islands import Islands, LinkPair
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.policy import Ask, Key, Pair, Policy, WorkerLoad, least_loaded, prefix_aware
from tandem.cluster.routing.push_times import FRESH_SECONDS, HALF_SECONDS, PushTimes
from tandem.cluster.routing.router import Router
from tandem.cluster.routing.worker_link import AVOID_SECONDS, WorkerAddress, WorkerLink
from tandem.proto import worker_pb2
from tandem.workers.config import Role

PREFILL, DECODE, OTHER = ("i0", 0), ("i0", 1), ("i1", 1)
REPORT = worker_pb2.WorkerReport(prompt_tokens=70, rows=3, token_seconds=0.008, prompt_tokens_per_second=9000)


class Gateway:
    """Two islands of a prefill worker, PE 0, and a decode worker, PE 1, as one of two gateway processes sees them."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, table_bytes(2, 2))
        self.table, self.other_table = (GatewayTable(memory, 2, 2, process) for process in range(2))
        self.islands = Islands(1 << 20, self._policy, 16, self.table)
        self._seen: Sequence[WorkerLoad] = ()

    async def start(self, number: int, epoch: int = 1) -> None:
        workers = tuple(WorkerAddress(role, pe, "127.0.0.1:1", "") for pe, role in enumerate(Role))
        await self.islands.update(IslandState(f"i{number}", epoch, 0, workers, epoch, number))

    def link(self, key: Key) -> WorkerLink:
        return self.islands.links()[key]

    def decide(self) -> dict[Key, WorkerLoad]:
        """Returns the loads that a decision sees."""
        for pair in self.islands.pairs(Ask(1, 1)):
            assert pair.decode.reachable
            assert pair.prefill.reachable
        return {load.key: load for load in self._seen}

    def _policy(self, workers: Sequence[WorkerLoad], ask: Ask, turn: int) -> Iterator[Pair]:
        self._seen = workers
        return least_loaded(workers, ask, turn)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces the clock of links; now: in seconds."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(worker_link, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def with_gateway(body: Callable[[Gateway], Awaitable[None]]) -> None:
    async def run() -> None:
        gateway = Gateway()
        for number in range(2):
            await gateway.start(number)
        try:
            await body(gateway)
        finally:
            await gateway.islands.close()

    asyncio.run(run())


def placed(load: WorkerLoad) -> tuple[int, int]:
    return load.load, load.prompt_tokens


def reported(load: WorkerLoad) -> tuple[int, int, float, float]:
    return load.prompt_tokens, load.rows, round(load.token_seconds, 6), load.prompt_rate


@pytest.mark.parametrize("policy", [least_loaded, prefix_aware, adaptive(0.25)])
def test_pushes_that_were_slow_between_hosts_let_the_near_prefill_worker_be_taken(policy: Policy) -> None:
    """It has 100 tokens to compute first, the far one none. Whatever joins the hosts, times alone count."""
    memory, now = mmap.mmap(-1, table_bytes(2, 2)), SimpleNamespace(seconds=100.0)
    islands = Islands(1 << 20, policy, 16, GatewayTable(memory, 2, 2, 0))
    islands._pushes = PushTimes(lambda: now.seconds)
    workers = (
        WorkerAddress(Role.PREFILL, 0, "10.0.0.1:1", ""),
        WorkerAddress(Role.PREFILL, 1, "10.0.0.2:1", ""),
        WorkerAddress(Role.DECODE, 2, "10.0.0.1:2", ""),
    )

    def prefills() -> list[int]:
        pairs = islands.pairs(Ask(1000, 1))
        return [pair.prefill.pe for pair in pairs if pair.decode.pe == 2 and pair.prefill.pe != 2]

    async def run() -> None:
        await islands.update(IslandState("i", 1, 0, workers, 1, 1))
        near, far, decode = (islands.links()["i", pe] for pe in range(3))
        near.report = far.report = worker_pb2.WorkerReport(prompt_tokens_per_second=1000)
        near.load = 100
        near.expect_prompt("before", 100)
        assert prefills()[0] == 1, "nothing is known of the link yet"
        for link, seconds in ((near, 50.0), (far, 0.5)):
            link.pushed_to(decode, 1000, seconds)
        now.seconds += FRESH_SECONDS
        assert prefills()[0] == 0
        now.seconds += 4 * HALF_SECONDS
        assert prefills()[0] == 1, "the link is not tried again"
        await islands.close()

    asyncio.run(run())


class TestADecisionSees:
    def test_what_this_process_places_and_takes_back(self) -> None:
        async def body(gateway: Gateway) -> None:
            link = gateway.link(DECODE)
            for tokens in (500, 300, 0):
                link.load = tokens
                assert gateway.decide()[DECODE].load == tokens
            assert gateway.decide()[OTHER].load == 0

        with_gateway(body)

    def test_prompts_until_they_are_forgotten_and_at_least_those_of_the_report(self) -> None:
        async def body(gateway: Gateway) -> None:
            link = gateway.link(PREFILL)
            link.expect_prompt("a", 100)
            assert gateway.decide()[PREFILL].prompt_tokens == 100
            link.report = REPORT
            link.expect_prompt("b", 20)
            assert gateway.decide()[PREFILL].prompt_tokens == 120
            link.forget_prompt("a")
            assert gateway.decide()[PREFILL].prompt_tokens == 70
            link.report = worker_pb2.WorkerReport()
            assert gateway.decide()[PREFILL].prompt_tokens == 20
            link.forget_prompt("b")
            assert gateway.decide()[PREFILL].prompt_tokens == 0

        with_gateway(body)

    def test_what_other_processes_and_other_hosts_have_placed(self) -> None:
        async def body(gateway: Gateway) -> None:
            gateway.link(OTHER).load = 1
            there = PlacedTokens(gateway.other_table, 1, OTHER[1])
            there.tokens.add(20)
            there.prompts.add(7)
            assert placed(gateway.decide()[OTHER]) == (21, 7)
            far = np.zeros_like(gateway.table.placed)
            far[there.columns[0] - gateway.table.placed_columns(0, 0)[0]] = 300
            gateway.table.put_far(far)
            assert placed(gateway.decide()[OTHER]) == (321, 7)
            gateway.other_table.clear(1, restarts=1)
            assert placed(gateway.decide()[OTHER]) == (301, 0)
            assert placed(gateway.decide()[DECODE]) == (0, 0)

        with_gateway(body)

    def test_the_latest_report_until_it_is_void(self) -> None:
        async def body(gateway: Gateway) -> None:
            assert gateway.decide()[DECODE].rows == 0
            gateway.link(DECODE).report = REPORT
            assert reported(gateway.decide()[DECODE]) == (70, 3, 0.008, 9000)
            gateway.link(DECODE)._lose_reports()
            assert reported(gateway.decide()[DECODE]) == (0, 0, 0, 0)

        with_gateway(body)

    def test_that_a_worker_is_avoided_and_that_it_is_not_any_more(self, clock: SimpleNamespace) -> None:
        async def body(gateway: Gateway) -> None:
            for _ in range(2):
                assert gateway.decide()[DECODE].reachable
                gateway.link(DECODE).avoid()
                assert not gateway.decide()[DECODE].reachable
                clock.now += AVOID_SECONDS * 0.9
                assert not gateway.decide()[DECODE].reachable
                clock.now += AVOID_SECONDS * 0.2
            assert gateway.decide()[DECODE].reachable

        with_gateway(body)

    def test_islands_that_came_and_what_changed_on_others_meanwhile(self) -> None:
        """An old epoch's tokens are no load of this process on the new one."""

        async def body(gateway: Gateway) -> None:
            gateway.link(DECODE).load = 8
            gateway.link(OTHER).load = 9
            assert gateway.decide()[OTHER].load == 9
            gateway.link(DECODE).load = 10
            await gateway.start(1, epoch=2)
            assert set(gateway.islands.links()) == {("i0", 0), ("i0", 1), ("i1", 0), ("i1", 1)}
            assert (gateway.decide()[DECODE].load, gateway.decide()[OTHER].load) == (10, 0)
            PlacedTokens(gateway.other_table, 1, OTHER[1]).tokens.add(3)
            assert gateway.decide()[OTHER].load == 3

        with_gateway(body)


def test_a_decision_looks_only_at_workers_that_have_changed(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    looked: list[Key] = []
    look = WorkerLink.worker_load

    def counted(link: WorkerLink) -> WorkerLoad:
        looked.append(link.key)
        return look(link)

    monkeypatch.setattr(WorkerLink, "worker_load", counted)

    def looks(gateway: Gateway) -> list[Key]:
        looked.clear()
        gateway.decide()
        return looked

    async def body(gateway: Gateway) -> None:
        assert sorted(looks(gateway)) == sorted(gateway.islands.links())
        assert looks(gateway) == []
        gateway.link(DECODE).load += 5
        gateway.link(PREFILL).report = REPORT
        PlacedTokens(gateway.other_table, 1, OTHER[1]).tokens.add(3)
        assert sorted(looks(gateway)) == [PREFILL, DECODE, OTHER]
        assert looks(gateway) == []
        gateway.link(OTHER).avoid()
        assert looks(gateway) == [OTHER]
        clock.now += 2 * AVOID_SECONDS
        assert looks(gateway) == [OTHER]
        assert looks(gateway) == []

    with_gateway(body)


def test_a_state_that_comes_late_changes_nothing() -> None:
    """Supervisors and replays of what they said may overtake each other: an older epoch's processes are gone."""

    async def body(gateway: Gateway) -> None:
        await gateway.start(0, epoch=3)
        await gateway.start(0, epoch=2)
        assert gateway.link(DECODE).epoch == 3
        await gateway.islands.update(IslandState("i0", 2, 0, (), version=2))
        assert gateway.decide()[DECODE].load == 0

    with_gateway(body)


def test_connections_to_workers_that_stay_are_kept_where_another_is_replaced() -> None:
    async def body(gateway: Gateway) -> None:
        stays, goes = (WorkerAddress(role, pe, "127.0.0.1:1", "", epoch=1) for pe, role in enumerate(Role))
        await gateway.islands.update(IslandState("i0", 1, 1, (stays, goes), 2, 0))
        prefill, decode = gateway.link(PREFILL), gateway.link(DECODE)
        await gateway.islands.update(IslandState("i0", 1, 1, (stays,), 3, 0, missing=1))
        assert gateway.link(PREFILL) is prefill
        assert DECODE not in gateway.islands.links()
        comes = WorkerAddress(goes.role, goes.pe, goes.address, "", epoch=2)
        await gateway.islands.update(IslandState("i0", 2, 1, (stays, comes), 4, 0))
        assert gateway.link(PREFILL) is prefill
        assert gateway.link(DECODE) is not decode
        assert [gateway.link(key).epoch for key in (PREFILL, DECODE)] == [1, 2]
        await gateway.start(0, epoch=5)
        assert gateway.link(PREFILL) is not prefill

    with_gateway(body)


class TestAWorkerThatIsAboutToLeave:
    @staticmethod
    async def tell(gateway: Gateway, version: int, leaving: frozenset[int], without: frozenset[int]) -> bool:
        """Island 0, whose second decode worker is about to leave, or has left."""
        roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
        workers = tuple(
            WorkerAddress(role, pe, "127.0.0.1:1", "", epoch=1) for pe, role in enumerate(roles) if pe not in without
        )
        return await gateway.islands.update(IslandState("i0", 1, 0, workers, version, 0, leaving=leaving))

    def test_gets_no_requests_but_may_send_what_it_has(self) -> None:
        async def body(gateway: Gateway) -> None:
            none, last = frozenset[int](), frozenset({2})
            assert await self.tell(gateway, 2, none, none)
            prefill, decode, leaver = (gateway.link(("i0", pe)) for pe in range(3))
            assert not await self.tell(gateway, 3, last, none)
            assert set(gateway.decide()) == {PREFILL, DECODE, ("i1", 0), OTHER}
            assert gateway.islands.workers("i0") == [prefill, decode, leaver]
            assert gateway.islands.serves(LinkPair(decode, leaver, 0.0))
            assert not gateway.islands.serves(LinkPair(leaver, prefill, 0.0))
            assert not await self.tell(gateway, 4, none, last)
            assert gateway.islands.workers("i0") == [prefill, decode], "links of workers that stay were made anew"
            assert not gateway.islands.serves(LinkPair(decode, leaver, 0.0))

        with_gateway(body)

    def test_is_told_to_be_busy_until_nothing_needs_it(self) -> None:
        async def body(gateway: Gateway) -> None:
            link = gateway.link(DECODE)
            for change, count in (
                (lambda: Router._count(link, gateway.link(PREFILL), 50, 30), 1),
                (lambda: link.expect_prompt("a", 20), 2),
                (lambda: Router._count(link, gateway.link(PREFILL), -50, -30), 1),
                (lambda: link.forget_prompt("a"), 0),
            ):
                change()
                assert (link.unfinished, gateway.link(PREFILL).unfinished) == (count, 0)

        with_gateway(body)
