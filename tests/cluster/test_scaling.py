"""Another shape for an island: which processes stay, what is refused, and what a failure leaves."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from tandem.cluster.config.sections import RecoverySection
from tandem.cluster.errors import ProcessEnded, ReshapeFailed, ScaleRefused
from tandem.cluster.processes.processes import ActorProcess
from tandem.cluster.scaling import ScaleOrder, ScaleOrders, ScaleOutcome, Shape, keep_members, plan_change
from tandem.cluster.supervision.island import Island
from tandem.cluster.supervision.islands import worker_changes
from tandem.cluster.supervision.islands.elastic_island import LEAST_PLACES
from tandem.transfer.errors import PeerGone
from tandem.workers.config import Role
from tests.cluster.fake_processes import FakeProcess, FakeProcesses, room_of_each
from tests.cluster.supervision.test_supervisors import RECOVERY, Cluster
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

    @pytest.mark.parametrize("before", [Shape(1, 1), Shape(2, 1), Shape(1, 3), Shape(4, 4)])
    def test_a_change_of_workers_leads_to_the_shape_by_as_few_as_possible(self, before: Shape) -> None:
        """The places are neither in order of roles nor without gaps."""
        now = {2 * place + place % 2: role for place, role in enumerate(reversed(before.roles))}
        for prefill, decode in itertools.product(range(1, 6), repeat=2):
            change = plan_change(now, Shape(prefill, decode))
            stay = {pe: role for pe, role in {**now, **change.turning}.items() if pe not in change.leaving}
            after = [*stay.values(), *change.joining]
            assert (after.count(Role.PREFILL), after.count(Role.DECODE)) == (prefill, decode)
            assert not (change.joining and change.leaving)
            assert all(now[pe] != role for pe, role in change.turning.items())
            lack = max(0, prefill - before.num_prefill), max(0, decode - before.num_decode)
            assert len(change.turning) + len(change.joining) == sum(lack)

    def test_nobody_gets_another_role_where_ranks_are_unlike(self) -> None:
        now = {0: Role.PREFILL, 1: Role.DECODE, 3: Role.DECODE}
        change = plan_change(now, Shape(2, 1), turn=False)
        assert (change.joining, change.turning, change.leaving) == ((Role.PREFILL,), {}, (3,))

    def test_the_highest_of_a_role_leaves(self) -> None:
        change = plan_change({0: Role.PREFILL, 1: Role.DECODE, 3: Role.DECODE, 5: Role.PREFILL}, Shape(1, 1))
        assert (change.joining, change.turning, change.leaving) == ((), {}, (3, 5))

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
def supervised(
    processes: FakeProcesses,
    device: str = "cpu",
    transport: str = "",
    recovery: RecoverySection = RECOVERY,
    ranks: tuple[int, int] = (1, 1),
) -> Iterator[Cluster]:
    cluster = Cluster(processes, recovery, device=device, transport=transport, ranks=ranks)
    cluster.supervisor.start()
    cluster.supervisor.ready.result(30)
    yield cluster
    cluster.supervisor.stop()
    cluster.supervisor.join()


def scale(cluster: Cluster, prefill: int | None, decode: int | None) -> Future[ScaleOutcome]:
    return cluster.supervisor.scale(order(prefill, decode))


def methods(process: FakeProcess) -> list[str]:
    return [method for method, _ in process.calls if method not in ("ping", "progress", "there", "wait", "share_cores")]


def arguments_of(process: FakeProcess, method: str) -> list[Any]:
    """Returns the arguments of each call of the method."""
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
            named = "^num_prefill is 2 and num_decode is 2: island i keeps serving as before: .*"
            with pytest.raises(ScaleRefused, match=named + reason):
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


GROWN = ["offer", "offer", "reach", "admit", "reach", "admit"]  # two others at once
AT_ONCE = RECOVERY.model_copy(update={"drain_seconds": 0.0})


def elastic(
    processes: FakeProcesses | None = None, recovery: RecoverySection = RECOVERY, ranks: tuple[int, int] = (1, 1)
) -> AbstractContextManager[Cluster]:
    """Runs a cluster of two workers that change without a new epoch of the others."""
    return supervised(processes or FakeProcesses(keeps_places=True), transport="tcp", recovery=recovery, ranks=ranks)


class Unreached(Future[Any]):
    """A call that fails because another process has ended, whose end is seen a moment later."""

    def __init__(self, lost: FakeProcess) -> None:
        super().__init__()
        self._lost = lost
        self.set_exception(PeerGone("PE 0 cannot be reached"))

    def result(self, timeout: float | None = None) -> Any:
        self._lost.kill()
        return super().result(timeout)


def pes(cluster: Cluster) -> list[tuple[int, int]]:
    """PE and epoch of the workers that the gateway knows."""
    return [(worker.pe, worker.epoch) for worker in cluster.states[-1].workers]


@pytest.mark.parametrize("transport", ["tcp", ""])
def test_new_workers_wait_for_the_kernels_of_their_hosts(transport: str) -> None:
    """Of an island that they join, and of one that is extended."""
    built, asked = Future[None](), list[str]()

    def begin(members: Sequence[ActorProcess]) -> list[Future[None]]:
        asked.extend(member.name for member in members)
        return [built]

    with supervised(FakeProcesses(keeps_places=True), transport=transport) as cluster:
        island_of = cluster.supervisor._island_of

        def built_island(epoch: int, shape: Shape) -> Island:
            island = island_of(epoch, shape)
            island.build_on_hosts = begin
            return island

        cluster.supervisor._island_of = built_island
        cluster.supervisor.island.build_on_hosts = begin
        outcome = scale(cluster, 1, 2)
        until(lambda: asked and "load" in methods(cluster.last.members[-1]))
        new = cluster.last.members[-1]
        assert (asked, methods(new), outcome.done()) == ([new.name], ["load"], False)
        built.set_result(None)
        assert outcome.result(30).started == 1


class TestElasticIsland:
    def test_grows_and_shrinks_and_those_that_stay_notice_little(self) -> None:
        with elastic() as cluster:
            first = list(cluster.last.members)
            grown = scale(cluster, 2, 2).result(30)
            assert (grown.kept, grown.started, grown.ended, grown.seconds_away) == (2, 2, 0, 0)
            assert pes(cluster) == [(0, 1), (1, 1), (2, 2), (3, 2)]
            new = cluster.last.members[2:]
            assert [methods(member) for member in new] == [FORMED] * 2
            specs: list[Any] = [spec.argument for spec in cluster.processes.specs[-1]]
            assert [(one.role, one.pe, one.epochs[:5]) for one in specs] == [
                (Role.PREFILL, 2, (1, 1, 2, 2, 0)),
                (Role.DECODE, 3, (1, 1, 2, 2, 0)),
            ]
            assert len({one.token for one in specs}) == 1
            shrunk = scale(cluster, 1, 1).result(30)
            assert (shrunk.kept, shrunk.started, shrunk.ended, shrunk.seconds_away) == (2, 0, 2, 0)
            assert [methods(member) for member in first] == [[*FORMED, *GROWN, "cut", "part", "cut", "part"]] * 2
            assert [methods(member) for member in new] == [[*FORMED, "stop"]] * 2
            assert all(member.killed for member in new)
            assert cluster.last.members == first
            scale(cluster, 1, 2).result(30)
            assert pes(cluster) == [(0, 1), (1, 1), (2, 3)], "a vacant place is not taken again"
            shares = [[given[:2] for given in arguments_of(member, "share_cores")] for member in first]
            assert shares == [[(4, None), (2, None), (3, None)], [(4, 2), (2, 1), (3, 2)]]
            (*_, (_, _, epochs)) = arguments_of(first[0], "share_cores")
            assert epochs[:4] == (1, 1, 3, 0)
            assert all(state.workers for state in cluster.states), "the island took no requests for a moment"

    def test_the_outcome_comes_once_new_workers_are_warm(self) -> None:
        with elastic() as cluster:
            cluster.gateway.silent.add("update_island")
            outcome = scale(cluster, 1, 2)
            until(lambda: len(cluster.states) == 3)
            cluster.gateway.answer_pending("update_island", None)
            with pytest.raises(TimeoutError):
                outcome.result(0.1)
            cluster.gateway.answer_pending("update_island", None)
            assert outcome.result(30).started == 1

    def test_a_gateway_that_is_slow_to_hear_of_it_is_not_taken_for_done(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_changes, "GATEWAY_SECONDS", 0.01)
        with elastic() as cluster:
            scale(cluster, 1, 2).result(30)
            cluster.gateway.silent.add("update_island")
            outcome = scale(cluster, 1, 1)
            until(lambda: len(arguments_of(cluster.gateway, "unfinished")) > 1)
            assert not any(member.killed for member in cluster.last.members)
            cluster.gateway.silent.remove("update_island")
            cluster.gateway.answer_pending("update_island", None)
            assert outcome.result(30).ended == 1

    def test_the_role_of_a_process_changes_and_its_weights_stay(self) -> None:
        with elastic() as cluster:
            scale(cluster, 1, 2).result(30)
            *_, turned = cluster.last.members
            outcome = scale(cluster, 2, 1).result(30)
            assert (outcome.kept, outcome.started, outcome.ended) == (3, 0, 0)
            assert methods(turned) == FORMED + FORMED_AGAIN
            ((name, config),) = arguments_of(turned, "rejoin")
            assert (config.role, config.pe, config.epoch, config.epochs[:4]) == (Role.PREFILL, 2, 3, (1, 1, 3, 0))
            assert name == turned.name == "c/i.3/prefill (PE 2)"
            assert [(worker.role, worker.epoch) for worker in cluster.states[-1].workers] == [
                (Role.PREFILL, 1),
                (Role.DECODE, 1),
                (Role.PREFILL, 3),
            ]
            assert not any(member.killed for member in cluster.last.members)

    def test_who_leaves_gets_nothing_new_and_has_time(self) -> None:
        """Then what it has not finished moves, and what has not moved is placed again."""
        with elastic() as cluster:
            scale(cluster, 1, 2).result(30)
            cluster.gateway.silent.add("unfinished")
            outcome = scale(cluster, 1, 1)
            for _ in range(2):
                until(lambda: cluster.gateway.awaits("unfinished"))
                assert (cluster.states[-1].leaving, len(cluster.states[-1].workers)) == (frozenset({2}), 3)
                cluster.gateway.answer_pending("unfinished", 1)
            until(lambda: ("i", frozenset({2}), True) in arguments_of(cluster.gateway, "unfinished"))
            assert not any(member.killed for member in cluster.last.members)
            cluster.gateway.silent.remove("unfinished")
            until(lambda: cluster.gateway.awaits("unfinished"))
            cluster.gateway.answer_pending("unfinished", 0)
            assert outcome.result(30).ended == 1
            assert arguments_of(cluster.gateway, "unfinished")[0] == ("i", frozenset({2}), False)
            assert (cluster.states[-1].leaving, len(cluster.states[-1].workers)) == (frozenset(), 2)

    @pytest.mark.parametrize(
        ("room", "fails", "reason"),
        [
            (1, {}, "no room for 2 processes"),
            (100, {"c/i.2/prefill (PE 2)": OSError("disk")}, "OSError: disk"),
            (100, {"c/i.2/decode (PE 3)": ProcessEnded("c/i.2/decode (PE 3)", "killed")}, "ended: killed"),
        ],
    )
    def test_what_cannot_be_started_is_refused(self, room: int, fails: dict[str, Exception], reason: str) -> None:
        with elastic() as cluster:
            cluster.processes.room, cluster.processes.fails = room, fails
            named = "^num_prefill is 2 and num_decode is 2: island i keeps serving as before: .*"
            with pytest.raises(ScaleRefused, match=named + reason):
                scale(cluster, 2, 2).result(30)
            assert cluster.updates == [(1, 0, 2)]
            assert len(cluster.last.members) == 2
            cluster.processes.room, cluster.processes.fails = 100, {}
            assert scale(cluster, 2, 1).result(30).epoch == 3
            assert pes(cluster) == [(0, 1), (1, 1), (2, 3)]

    def test_a_worker_that_is_lost_while_another_joins_is_replaced_with_it(self) -> None:
        with elastic() as cluster:
            cluster.processes.silent = {"load"}
            outcome = scale(cluster, 2, 1)
            until(lambda: len(cluster.last.members) == 3 and cluster.last.members[2].awaits("load"))
            cluster.processes.silent = set()
            cluster.last.members[1].kill()
            assert (outcome.result(30).kept, outcome.result(30).started) == (2, 1)
            assert pes(cluster) == [(0, 1), (1, 3), (2, 3)]
            assert [state.missing for state in cluster.states] == [0, 2, 0, 0]

    def test_a_loss_that_another_notices_first_is_made_up_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with elastic() as cluster:
            scale(cluster, 1, 2).result(30)
            lost, kept, turned = cluster.last.members

            def call(method: str, *arguments: object) -> Future[Any]:
                return Unreached(lost) if method == "join" else FakeProcess.call(turned, method, *arguments)

            monkeypatch.setattr(turned, "call", call)
            assert scale(cluster, 2, 1).result(30).kept == 3
            assert pes(cluster) == [(0, 4), (1, 1), (2, 4)]
            assert [worker.role for worker in cluster.states[-1].workers] == [Role.PREFILL, Role.DECODE, Role.PREFILL]
            assert not kept.killed

    def test_a_worker_that_is_lost_while_another_leaves_is_replaced_alone(self) -> None:
        with elastic() as cluster:
            scale(cluster, 1, 2).result(30)
            cluster.gateway.silent.add("unfinished")
            outcome = scale(cluster, 1, 1)
            until(lambda: cluster.gateway.awaits("unfinished"))
            cluster.gateway.answer_pending("unfinished", 1)
            cluster.last.members[0].kill()
            until(lambda: cluster.states[-1].workers[0].epoch == 3)
            assert [state.leaving for state in cluster.states[-2:]] == [frozenset({2})] * 2
            cluster.gateway.silent.remove("unfinished")
            cluster.gateway.answer_pending("unfinished", 0)
            assert (outcome.result(30).kept, outcome.result(30).ended) == (2, 1)
            assert pes(cluster) == [(0, 3), (1, 1)]

    def test_a_worker_that_is_lost_while_two_are_let_go_keeps_none_of_them_as_a_peer(self) -> None:
        """Else its peers would miss the second one, and end after a while."""
        with elastic() as cluster:
            scale(cluster, 1, 3).result(30)
            cluster.last.members[0].ends_at = "part"
            outcome = scale(cluster, 1, 1).result(30)
            assert (outcome.kept, outcome.ended) == (2, 2)
            assert arguments_of(cluster.last.members[1], "part") == [(2,), (3,), (0,)]
            assert pes(cluster) == [(0, 3), (1, 1)]

    def test_a_worker_that_is_lost_while_it_leaves_is_not_replaced(self) -> None:
        with elastic() as cluster:
            scale(cluster, 1, 2).result(30)
            cluster.gateway.silent.add("unfinished")
            outcome = scale(cluster, 1, 1)
            until(lambda: cluster.gateway.awaits("unfinished"))
            cluster.last.members[2].kill()
            cluster.gateway.answer_pending("unfinished", 1)
            assert outcome.result(30).ended == 1
            assert pes(cluster) == [(0, 1), (1, 1)]
            assert cluster.updates[-1] == (2, 0, 2), "its end counts as a restart"

    def test_a_loss_that_cannot_be_made_up_for_brings_the_old_shape_back(self) -> None:
        with elastic(recovery=RECOVERY.model_copy(update={"max_restarts": 1})) as cluster:
            cluster.last.members[0].kill()
            until(lambda: cluster.updates[-1] == (2, 1, 2))
            cluster.processes.silent = {"load"}
            outcome = scale(cluster, 2, 1)
            until(lambda: len(cluster.last.members) == 3 and cluster.last.members[2].awaits("load"))
            cluster.last.members[1].kill()
            with pytest.raises(ReshapeFailed, match="keeps its shape"):
                outcome.result(30)
            assert "recovery.max_restarts" in str(cluster.failure.result(30))

    def test_more_workers_than_places_begin_an_epoch(self) -> None:
        with elastic(recovery=AT_ONCE) as cluster:
            scale(cluster, 1, 2).result(30)
            scale(cluster, 2, 1).result(30)  # so that PEs and roles are in another order
            outcome = scale(cluster, 1, LEAST_PLACES)
            assert (outcome.result(30).kept, outcome.result(30).started) == (3, LEAST_PLACES - 2)
            assert pes(cluster) == [(pe, 4) for pe in range(LEAST_PLACES + 1)]
            assert [methods(member)[-5:] for member in cluster.last.members[:3]] == [FORMED_AGAIN] * 3
            first, *_ = cluster.last.members
            ((_, config),) = arguments_of(first, "rejoin")
            assert config.num_pes == 2 * (LEAST_PLACES + 1)
            scale(cluster, 1, LEAST_PLACES + 1).result(30)
            assert methods(first)[-3:] == ["offer", "reach", "admit"]


class TestElasticRanks:
    """Workers of several ranks, in an island where each comes and goes alone."""

    @pytest.mark.parametrize("keeps_places", [False, True])
    def test_a_worker_is_replaced_with_all_its_ranks(self, keeps_places: bool) -> None:
        with elastic(FakeProcesses(keeps_places=keeps_places), ranks=(2, 2)) as cluster:
            leader, follower, *lost = cluster.last.members
            lost[1].kill()
            until(lambda: cluster.updates[-1] == (2, 1, 2))
            assert all(member.killed for member in lost)
            assert not leader.killed
            assert not follower.killed
            assert methods(leader) == [*FORMED, "cut", "part", "offer", "reach", "admit"]
            assert methods(follower) == [*FORMED, "cut", "offer", "reach"]
            assert arguments_of(follower, "reach") == [(1, b"handle\nhandle")]
            *_, new = (member for member in cluster.last.members)
            ((handles,),) = arguments_of(new, "join")
            assert handles[2:] == [b"handle"] * 2 + [b""] * 2 * (LEAST_PLACES - 2)
            specs: list[Any] = [spec for specs in cluster.processes.specs[1:] for spec in specs]
            assert [(one.argument.pe, one.argument.rank, one.argument.epoch) for one in specs] == [(1, 0, 2), (1, 1, 2)]
            assert len({one.place for one in specs}) == 1, "ranks share a host"

    def test_nothing_is_freed_before_all_ranks_have_cut(self) -> None:
        with elastic(ranks=(2, 2)) as cluster:
            leader, follower, *_, lost = cluster.last.members
            follower.silent.add("cut")
            lost.kill()
            until(lambda: follower.awaits("cut"))
            assert arguments_of(leader, "part") == []
            follower.answer_pending("cut", None)
            until(lambda: cluster.updates[-1] == (2, 1, 2))
            assert arguments_of(leader, "part") == [(1,)]

    def test_a_worker_whose_rank_is_lost_meanwhile_frees_nothing(self) -> None:
        with elastic(ranks=(2, 2)) as cluster:
            leader, follower, _, lost = cluster.last.members
            follower.ends_at = "cut"
            lost.kill()
            until(lambda: cluster.updates[-1] == (2, 2, 2))
            assert arguments_of(leader, "part") == []
            assert pes(cluster) == [(0, 2), (1, 2)]

    def test_a_worker_of_other_ranks_joins_where_there_is_room_for_them(self) -> None:
        with elastic(ranks=(1, 2), recovery=AT_ONCE) as cluster:
            scale(cluster, 1, 2).result(30)
            outcome = scale(cluster, 2, 1).result(30)
            assert (outcome.kept, outcome.started, outcome.ended) == (2, 1, 1)
            assert pes(cluster) == [(0, 1), (1, 1), (2, 3)]
            specs: list[Any] = [spec.argument for spec in cluster.processes.specs[-1]]
            assert [(one.role, one.pe, one.rank) for one in specs] == [(Role.PREFILL, 2, 0)]
            assert specs[0].ranks == (1, 2) + (1,) * 6 + (2,) * 6
            scale(cluster, 1, LEAST_PLACES).result(30)
            assert pes(cluster) == [(pe, 4) for pe in range(1 + LEAST_PLACES)], "there are places for 7 of them"
