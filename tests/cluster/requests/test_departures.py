"""Tests where the requests of leaving workers go."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from tandem.cluster.requests.active_requests import ActiveRequests
from tandem.cluster.requests.departures import unfinished
from tandem.cluster.routing.membership import IslandState
from tandem.cluster.routing.worker_link import WorkerAddress, WorkerLink
from tandem.workers.config import Role
from tests.cluster.routing.test_islands import Gateway, with_gateway


class Moves:
    """Stands for ActiveRequests: notes what is to move."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def move(self, source: WorkerLink, target: WorkerLink, count: int, *, leaves: bool) -> int:
        assert leaves
        self.asked.append((source.pe, target.pe, count))
        return count


async def with_workers(gateway: Gateway, roles: str, leaving: set[int]) -> tuple[Callable[..., int], Moves]:
    """Island 0 of these roles."""
    kinds = {"p": Role.PREFILL, "d": Role.DECODE}
    workers = tuple(WorkerAddress(kinds[role], pe, "127.0.0.1:1", "", epoch=1) for pe, role in enumerate(roles))
    for version, pes in ((2, frozenset[int]()), (3, frozenset(leaving))):
        await gateway.islands.update(IslandState("i0", 1, 0, workers, version, 0, leaving=pes))
    moves = Moves()
    return partial(unfinished, gateway.islands, cast(ActiveRequests, moves)), moves


def test_requests_are_spread_over_the_decode_workers_that_stay() -> None:
    async def body(gateway: Gateway) -> None:
        needing, moves = await with_workers(gateway, "pddd", {3})
        _, busy, _, leaver = gateway.islands.workers("i0")
        busy.load, leaver.decoding = 100, 5
        leaver.expect_prompt("a", 10)
        assert needing("i0", {3}, move=False) == 6
        assert moves.asked == []
        assert needing("i0", {3}, move=True) == 6
        assert moves.asked == [(3, 2, 3), (3, 1, 3)], "the least loaded one comes first"

    with_gateway(body)


def test_without_a_decode_worker_that_can_be_reached_any_worker_takes_them() -> None:
    async def body(gateway: Gateway) -> None:
        needing, moves = await with_workers(gateway, "pdd", {2})
        _, away, leaver = gateway.islands.workers("i0")
        away.avoid()
        leaver.decoding = 1
        needing("i0", {2}, move=True)
        assert moves.asked == [(2, 0, 1)]

    with_gateway(body)


def test_another_island_knows_of_nothing() -> None:
    async def body(gateway: Gateway) -> None:
        needing, moves = await with_workers(gateway, "pd", {1})
        arguments: Any = ("i7", {1})
        assert needing(*arguments, move=True) == 0
        assert moves.asked == []

    with_gateway(body)
