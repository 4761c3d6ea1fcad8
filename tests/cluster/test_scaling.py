"""Another shape for an island: which processes stay, what is refused, and what a failure leaves."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.cluster.errors import ProcessEnded, ReshapeFailed, ScaleRefused
from tandem.cluster.scaling import ScaleOrder, ScaleOrders, ScaleOutcome, Shape, keep_members
from tandem.workers.config import Role
from tests.cluster.fake_processes import FakeProcess, FakeProcesses, room_of_each
from tests.cluster.supervision.test_supervisors import Cluster
from tests.support.waiting import until


def order(prefill: int | None, decode: int | None) -> ScaleOrder:
    return ScaleOrder(1, "", prefill, decode)


class TestPlan:
    @pytest.mark.parametrize("before", [Shape(1, 1), Shape(2, 1), Shape(1, 3)])
    def test_as_many_as_possible_stay_and_of_those_in_their_role(self, before: Shape) -> None:
        for prefill, decode in itertools.product(range(1, 5), repeat=2):
            after = Shape(prefill, decode)
            kept = keep_members(before.roles, after.roles)
            stay = [pe for pe in kept if pe is not None]
            assert len(kept) == prefill + decode
            assert len(set(stay)) == len(stay) == min(len(before.roles), len(kept))
            unchanged = sum(pe is not None and before.roles[pe] == after.roles[place] for place, pe in enumerate(kept))
            assert unchanged == min(before.num_prefill, prefill) + min(before.num_decode, decode)

    def test_roles(self) -> None:
        assert Shape(2, 1).roles == [Role.PREFILL, Role.PREFILL, Role.DECODE]
        assert order(None, 3).shape(Shape(2, 1)) == Shape(2, 3)


def test_orders_have_their_turn_and_always_end() -> None:
    orders = ScaleOrders()
    waiting = orders.first
    assert not waiting.done()
    outcomes = [orders.add(order(number, None)) for number in (1, 2, 3)]
    assert waiting.done()
    assert orders.take()[0].num_prefill == 1
    assert orders.take()[0].num_prefill == 2
    orders.close(ScaleRefused("over"))
    outcomes.append(orders.add(order(4, None)))
    assert [outcome.done() for outcome in outcomes] == [False, False, True, True]
    with pytest.raises(ScaleRefused):
        outcomes[-1].result()
    assert not orders.first.done()


@contextmanager
def supervised(processes: FakeProcesses, device: str = "cpu") -> Iterator[Cluster]:
    cluster = Cluster(processes, device=device)
    cluster.supervisor.start()
    cluster.supervisor.ready.result(30)
    yield cluster
    cluster.supervisor.stop()
    cluster.supervisor.join()


def scale(cluster: Cluster, prefill: int | None, decode: int | None) -> Future[ScaleOutcome]:
    return cluster.supervisor.scale(order(prefill, decode))


def methods(process: FakeProcess) -> list[str]:
    return [method for method, _ in process.calls if method not in ("ping", "progress", "there", "wait")]


def arguments_of(process: FakeProcess, method: str) -> list[Any]:
    """What each call of the method was given."""
    return [arguments for called, arguments in process.calls if called == method]


FORMED = ["load", "open", "join", "serve"]
FORMED_AGAIN = ["leave", "rejoin", "open", "join", "serve"]


class TestIsland:
    def test_grows_and_shrinks_and_those_that_stay_load_once(self) -> None:
        with supervised(FakeProcesses()) as cluster:
            first = list(cluster.last.members)
            assert scale(cluster, 2, 2).result(30).epoch == 2
            assert [methods(member) for member in first] == [FORMED + FORMED_AGAIN] * 2
            assert [methods(member) for member in cluster.last.members[2:]] == [FORMED] * 2
            shrunk = scale(cluster, 1, 1).result(30)
            assert (shrunk.kept, shrunk.started, shrunk.ended) == (2, 0, 2)
            assert len(cluster.last.members) == 2
            assert cluster.updates == [(1, 0, 2), (1, 0, 0), (2, 0, 4), (2, 0, 0), (3, 0, 2)]
            cluster.last.members[0].kill()  # the shape outlives a loss
            until(lambda: cluster.updates[-1] == (4, 1, 2))

    def test_the_role_of_a_process_changes(self) -> None:
        with supervised(FakeProcesses()) as cluster:
            scale(cluster, 1, 2).result(30)
            scale(cluster, 2, 1).result(30)
            every = [arguments_of(member, "rejoin") for member in cluster.last.members]
            roles = [[(config.role, config.pe, config.num_pes, config.epoch) for _, config in one] for one in every]
            assert roles == [
                [(Role.PREFILL, 0, 3, 2), (Role.PREFILL, 0, 3, 3)],
                [(Role.DECODE, 1, 3, 2), (Role.DECODE, 2, 3, 3)],
                [(Role.PREFILL, 1, 3, 3)],
            ]
            names = [member.name for member in cluster.last.members]
            assert [calls[-1][0] for calls in every] == names
            assert [name.rpartition("/")[2] for name in names] == ["prefill (PE 0)", "decode (PE 2)", "prefill (PE 1)"]

    def test_the_same_shape_disturbs_nothing(self) -> None:
        with supervised(FakeProcesses()) as cluster:
            outcome = scale(cluster, 1, None).result(30)
            assert (outcome.epoch, outcome.kept) == (1, 2)
            assert cluster.updates == [(1, 0, 2)]

    def test_the_outcome_comes_once_the_gateway_knows(self) -> None:
        """The outcome comes once the gateway has the new shape. A gateway that is gone keeps nobody waiting."""

        def answer(method: str) -> None:
            if method == "leave":
                cluster.gateway.silent.add("update_island")

        with supervised(FakeProcesses(answers=answer)) as cluster:
            outcome = scale(cluster, 2, 2)
            until(lambda: cluster.updates[-1] == (2, 0, 4))
            with pytest.raises(TimeoutError):
                outcome.result(0.1)
            cluster.gateway.kill()
            assert outcome.result(30).epoch == 2

    @pytest.mark.parametrize(
        ("room", "fails", "reason"),
        [
            (1, {}, "no room for 2 processes"),
            (100, {"c/i.2/prefill (PE 1)": OSError("disk")}, "OSError: disk"),
            (100, {"c/i.2/decode (PE 3)": ProcessEnded("c/i.2/decode (PE 3)", "killed")}, "ended: killed"),
        ],
    )
    def test_what_cannot_be_started_is_refused(self, room: int, fails: dict[str, Exception], reason: str) -> None:
        with supervised(FakeProcesses()) as cluster:
            cluster.processes.room, cluster.processes.fails = room, fails
            with pytest.raises(ScaleRefused, match=reason):
                scale(cluster, 2, 2).result(30)
            assert cluster.updates == [(1, 0, 2)]
            assert [methods(member) for member in cluster.last.members] == [FORMED] * 2
            cluster.processes.room, cluster.processes.fails = 100, {}
            assert scale(cluster, 2, 1).result(30).epoch == 3

    def test_new_gpus_need_room_for_the_pages_that_there_are(self) -> None:
        processes = FakeProcesses()
        rooms = iter([64, 64, 40, 70])
        processes.answers = room_of_each(rooms)
        with supervised(processes, "cuda") as cluster:
            with pytest.raises(ScaleRefused, match="room for 40 pages; the island had 64"):
                scale(cluster, 2, None).result(30)
            scale(cluster, 2, None).result(30)
            opened = [given for member in cluster.last.members for given in arguments_of(member, "open")]
            assert [pages for pages, _ in opened] == [64] * 5

    @pytest.mark.parametrize(
        "lose", [lambda member: member.kill(), lambda member: member.fails.update(leave=TimeoutError("it hangs"))]
    )
    def test_a_loss_in_the_middle_brings_the_old_shape_back(self, lose: Callable[[FakeProcess], None]) -> None:
        with supervised(FakeProcesses()) as cluster:
            old = list(cluster.last.members)
            cluster.gateway.silent.add("placed_tokens")
            outcome = scale(cluster, 2, 1)
            until(lambda: cluster.gateway.awaits("placed_tokens"))
            new = cluster.last.members[2]
            cluster.gateway.silent.remove("placed_tokens")
            lose(old[1])
            with pytest.raises(ReshapeFailed, match="keeps its shape"):
                outcome.result(30)
            until(lambda: cluster.updates[-1] == (3, 1, 2))
            assert all(member.killed for member in [*old, new])
            assert [spec.argument.role for spec in cluster.processes.specs[-1]] == [Role.PREFILL, Role.DECODE]  # type: ignore[attr-defined]
