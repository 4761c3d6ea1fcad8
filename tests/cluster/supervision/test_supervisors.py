"""Tests what is watched, what is started again and how often, with scripted processes."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.config.sections import RecoverySection
from tandem.cluster.errors import ProcessEnded, StartFailed, TandemError, WorkerLost
from tandem.cluster.frontends.orders import Order
from tandem.cluster.peers.table import Column, GatewayTable, open_table
from tandem.cluster.routing.membership import Membership
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome, Shape
from tandem.cluster.supervision import supervisor
from tandem.cluster.supervision.gateway_supervisor import GatewayShape, GatewaySupervisor
from tandem.cluster.supervision.heartbeat import MEETING, MEETING_SECONDS, POLL_SECONDS, Heartbeat
from tandem.cluster.supervision.island import Island
from tandem.cluster.supervision.island_supervisor import IslandSupervisor
from tandem.cluster.supervision.islands.elastic_island import LEAST_PLACES, ElasticIsland, places
from tandem.cluster.supervision.liveness import Liveness
from tandem.cluster.supervision.process_settings import gateway_settings, is_elastic, island_name
from tandem.cluster.supervision.shared_ports import SharedPorts
from tandem.cluster.supervision.stop_signal import Stopping, StopSignal
from tandem.cluster.supervision.supervisor import RestartBudget
from tandem.transfer.endpoint import LOOPBACK
from tandem.transfer.errors import PeerGone
from tests.cluster.fake_processes import ANSWERS, FakeGroup, FakeProcess, FakeProcesses, room_of_each
from tests.support.gateways import NO_MODEL, known
from tests.support.waiting import until

PATIENT = RecoverySection()
RECOVERY = RecoverySection(unresponsive_seconds=0.3, stalled_seconds=0.5, max_restarts=2, drain_seconds=0.5)


class TestBudget:
    def test_counts_within_a_window(self) -> None:
        budget = RestartBudget(2, 10.0)
        assert [budget.take(now) for now in (0.0, 1.0, 2.0, 9.9, 10.0, 10.5, 11.0)] == [
            True, True, False, False, True, False, True,
        ]  # fmt: skip
        assert budget.used == 4

    def test_none(self) -> None:
        assert not RestartBudget(0, 10.0).take(0.0)


class TestHeartbeat:
    def test_silence_counts_from_the_process(self) -> None:
        process = FakeProcess("p")
        process.silent |= {"there", "ping"}
        heartbeat = Heartbeat(process)
        for _ in range(10):
            heartbeat.tick(0.3)
        assert (heartbeat.silent_seconds, heartbeat.stalled_seconds) == (0, pytest.approx(3.0))
        process.silent.remove("there")
        heartbeat = Heartbeat(process)
        for _ in range(10):
            heartbeat.tick(0.3)
        assert (heartbeat.silent_seconds, heartbeat.stalled_seconds) == (pytest.approx(3.0), 0)

    def test_who_answers_and_does_not_get_on(self) -> None:
        """It gets on once, stays there, and then has nothing to prepare any more."""
        got_to = iter([*(("weights", number) for number in (5, 9, 9, 9, 9)), None, None, ("island", 9), ("kernels", 9)])
        process = FakeProcess("p", lambda method: next(got_to) if method == "ping" else None)
        heartbeat = Heartbeat(process)
        stalled = []
        for _ in range(8):
            heartbeat.tick(0.3)
            stalled.append(heartbeat.stalled_seconds)
        assert stalled == pytest.approx([0, 0, 0.3, 0.6, 0.9, 0, 0, 0])
        assert heartbeat.silent_seconds == 0

    def test_what_takes_long_is_told_whenever_it_has_doubled(self, caplog: pytest.LogCaptureFixture) -> None:
        built = "has 7 kernels and graphs ready, and has finished no other"
        for phase, ticks, told, what in (
            ("weights", 100, (15.0, 30.0), "has made no progress"),
            ("kernels", 239, (), built),
            ("kernels", 300, (120.0,), built),
        ):
            caplog.clear()
            process = FakeProcess("p", lambda method, phase=phase: (phase, 7))
            heartbeat = Heartbeat(process)
            heartbeat.tick(0.5)
            for _ in range(ticks):
                heartbeat.tick(0.5)
                heartbeat.warn()
            process.silent.add("ping")
            heartbeat.tick(0.5)
            assert [record.message for record in caplog.records] == [
                f"p {what} for {seconds} s in phase '{phase}' of its start" for seconds in told
            ]

    def test_who_is_silent_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        process = FakeProcess("p")
        heartbeat = Heartbeat(process)
        process.silent.add("ping")
        for _ in range(40):
            heartbeat.tick(0.5)
            heartbeat.warn()
        assert [record.message for record in caplog.records] == ["p has not answered for 15.0 s"]

    def test_workers_that_wait_for_each_other_have_less_time(self) -> None:
        """The other phases may compile kernels, for minutes."""
        ended_after = {}
        for phase in (MEETING, "kernels"):
            heartbeat = Heartbeat(FakeProcess("p", lambda method, phase=phase: (phase, 1)))
            heartbeat.tick(0.5)
            while not heartbeat.excess(PATIENT):
                heartbeat.tick(0.5)
            ended_after[phase] = heartbeat.stalled_seconds
        assert ended_after == {MEETING: MEETING_SECONDS + 0.5, "kernels": PATIENT.stalled_seconds + 0.5}

    def test_a_watcher_that_was_stopped_itself_blames_nobody(self) -> None:
        process = FakeProcess("p")
        heartbeat = Heartbeat(process)
        process.silent.add("ping")
        heartbeat.tick(0.1)
        heartbeat.tick(3600.0)
        assert heartbeat.silent_seconds <= 2 * POLL_SECONDS

    def test_an_answer_ends_the_silence(self) -> None:
        process = FakeProcess("p")
        process.fails["ping"] = TimeoutError("the step thread hangs")
        heartbeat = Heartbeat(process)
        heartbeat.tick(0.3)
        heartbeat.tick(0.3)
        assert heartbeat.silent_seconds == pytest.approx(0.6)
        process.fails.clear()
        heartbeat.tick(0.3)
        heartbeat.tick(0.3)
        assert heartbeat.silent_seconds == 0

    def test_imports_do_not_stall_while_nothing_can_be_started(self) -> None:
        process = FakeProcess("p")
        process.silent |= {"there", "ping"}
        process.held_up = True
        heartbeat = Heartbeat(process)
        for _ in range(10):
            heartbeat.tick(0.3)
        assert heartbeat.stalled_seconds == 0
        process.held_up = False
        for _ in range(10):
            heartbeat.tick(0.3)
        assert heartbeat.stalled_seconds == pytest.approx(3.0)

    def test_a_process_is_not_silent_where_its_host_is(self) -> None:
        process = FakeProcess("p")
        process.silent.add("ping")
        process.silent_for = RECOVERY.cut_off_seconds
        heartbeat = Heartbeat(process)
        for _ in range(10):
            heartbeat.tick(0.3)
        assert heartbeat.excess(RECOVERY) == ""
        process.silent_for += 0.1
        assert "recovery.partition_seconds" in heartbeat.excess(RECOVERY)


class TestLiveness:
    def test_an_end_is_told(self) -> None:
        members = [FakeProcess("a"), FakeProcess("b")]
        liveness = Liveness(members[:1], PATIENT, StopSignal())
        liveness.add(members[1:])
        threading.Timer(0.05, members[1].kill).start()
        with pytest.raises(ProcessEnded, match="b ended"):
            liveness.results([Future()], 60)

    def test_a_member_that_cannot_go_on_says_why(self) -> None:
        class Lost(FakeProcess):
            def call(self, method: str, *arguments: object) -> Future[Any]:
                self.fails = {"wait": PeerGone("PE 1: its connection is lost")}
                return super().call(method, *arguments)

        with pytest.raises(ProcessEnded, match="a ended: PE 1: its connection is lost"):
            Liveness([Lost("a")], PATIENT, StopSignal()).results([Future()], 60)

    @pytest.mark.parametrize(
        ("answers", "silent", "why"),
        [(("kernels", 7), {"wait"}, "it has made no progress for .* in phase 'kernels'"),
         (None, {"wait", "ping"}, "it was silent"),
         (None, {"wait", "ping", "there"}, "it has made no progress for .* in phase 'imports'")],
    )  # fmt: skip
    def test_who_hangs_is_ended(self, answers: tuple[str, int] | None, silent: set[str], why: str) -> None:
        member = FakeProcess("a", lambda method: answers)
        member.silent = silent
        with pytest.raises(ProcessEnded, match=why):
            Liveness([member], RECOVERY, StopSignal()).results([Future()], 60)
        assert member.killed

    def test_a_call_that_takes_too_long_says_who_does_what(self) -> None:
        members = [FakeProcess("a"), FakeProcess("b", lambda method: ("weights", 7))]
        with pytest.raises(TimeoutError, match=r"no answer within 0\.4 s; b is in phase 'weights'$"):
            Liveness(members, PATIENT, StopSignal()).results([Future()], 0.4)

    def test_a_call_may_take_long_while_somebody_gets_on(self) -> None:
        ticks = iter(range(10_000))
        liveness = Liveness([FakeProcess("a", lambda method: ("weights", next(ticks)))], PATIENT, StopSignal())
        event: Future[str] = Future()
        threading.Timer(2.0, event.set_result, ("loaded",)).start()
        assert liveness.results([event], 0.8) == ["loaded"]

    def test_the_forgotten_may_end(self) -> None:
        members = [FakeProcess("a"), FakeProcess("b")]
        liveness = Liveness(members, PATIENT, StopSignal())
        liveness.forget(members[:1])
        members[0].kill()
        event: Future[None] = Future()
        threading.Timer(0.05, event.set_result, (None,)).start()
        liveness.results([event], 60)

    def test_others_are_heard_out_where_one_is_lost(self) -> None:
        """Then the loss is told."""
        members = [FakeProcess("a"), FakeProcess("b")]
        for member in members:
            member.silent.add("cut")
        liveness = Liveness(members, PATIENT, StopSignal())
        calls = [member.call("cut") for member in members]
        members[0].kill()
        threading.Timer(0.3, members[1].answer_pending, ("cut", None)).start()
        liveness.outlast(calls, 60)
        assert calls[1].done()
        with pytest.raises(ProcessEnded, match="a ended"):
            liveness.results([Future()], 60)

    def test_a_call_without_an_end_is_not_heard_out(self) -> None:
        call: Future[None] = Future()
        Liveness([FakeProcess("a")], PATIENT, StopSignal()).outlast([call], 0.1)
        assert not call.done()

    def test_called_off(self) -> None:
        stop = StopSignal()
        threading.Timer(0.05, stop.call_off).start()
        with pytest.raises(Stopping):
            Liveness([FakeProcess("a")], PATIENT, stop).results([Future()], 60)


class Cluster:
    """One supervised island of a prefill and a decode worker, and a gateway that notes its updates."""

    def __init__(
        self,
        processes: FakeProcesses,
        recovery: RecoverySection = RECOVERY,
        device: str = "cpu",
        transport: str = "",
        ranks: tuple[int, int] = (1, 1),
    ) -> None:
        """ranks: of a prefill and of a decode worker."""
        self.processes = processes
        transport = transport or {"cpu": "shared_memory", "cuda": "nvshmem"}[device]
        values: dict[str, Any] = {"name": "c", "model.path": ".", "island.device": device}
        values |= {"island.transport": transport, "island.prefill_ranks": ranks[0], "island.decode_ranks": ranks[1]}
        self._config = load_config(None, values)
        self.membership = Membership()
        self.gateway = FakeProcess("gateway")
        self.membership.attach(self.gateway)
        self.failure: Future[TandemError] = Future()
        self.supervisor = IslandSupervisor(
            "i", Shape(1, 1), self._island, self.membership, recovery, self.failure.set_result
        )

    def _island(self, epoch: int, shape: Shape) -> Island:
        config = self._config.model_copy(update={"island": self._config.island.model_copy(update=asdict(shape))})
        kind = ElasticIsland if is_elastic(config) else Island
        return kind(self.processes, config, 64, "i", epoch)

    @property
    def updates(self) -> list[tuple[int, int, int]]:
        """(epoch, restarts, number of workers) as the gateway noted them."""
        return [(state.epoch, state.restarts, len(state.workers)) for state in self.states]

    @property
    def states(self) -> list[Any]:
        return [arguments[0] for method, arguments in self.gateway.calls if method == "update_island"]

    @property
    def last(self) -> FakeGroup:
        return self.processes.groups[-1]


class TestElasticIsland:
    """An island whose workers are replaced one by one."""

    def served(self, processes: FakeProcesses, device: str = "cpu", transport: str = "tcp") -> Cluster:
        cluster = Cluster(processes, device=device, transport=transport)
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        return cluster

    def test_it_is_formed_with_vacant_places(self) -> None:
        cluster = self.served(FakeProcesses())
        for member in cluster.last.members:
            assert [arguments for method, arguments in member.calls if method == "join"] == [
                ([b"handle"] * 2 + [b""] * (LEAST_PLACES - 2),)
            ]
        workers: list[Any] = [spec.argument for spec in cluster.processes.specs[-1]]
        assert [(one.num_pes, one.epochs) for one in workers] == [(LEAST_PLACES, (1, 1, 0, 0, 0, 0, 0, 0))] * 2
        cluster.supervisor.stop()
        cluster.supervisor.join()

    @pytest.mark.parametrize(
        ("settings", "sizes"),
        [
            ({}, (1,) * LEAST_PLACES),
            ({"island.num_prefill": 2, "island.num_decode": 4}, (1,) * 12),
            ({"scaling.max_workers": 20, "scaling.queue_seconds": 1.0}, (1,) * 20),
            ({"record.folder": "/tmp"}, (1, 1)),
            ({"island.prefill_ranks": 2, "island.decode_ranks": 2}, (2,) * LEAST_PLACES),
            ({"island.decode_ranks": 2}, (1, 2) + (1,) * 6 + (2,) * 6),
            ({"island.prefill_ranks": 4, "island.num_decode": 4}, (4, 1, 1, 1, 1) + (1,) * 5 + (4,) * 5),
        ],
    )
    def test_places_are_enough_for_twice_the_workers(self, settings: dict[str, Any], sizes: tuple[int, ...]) -> None:
        """Workers of either role have them, if their numbers of ranks differ."""
        assert places(load_config(None, {"island.transport": "tcp", **settings})) == sizes

    @pytest.mark.parametrize("keeps_places", [False, True])
    def test_a_lost_worker_is_replaced_alone(self, keeps_places: bool) -> None:
        cluster = self.served(FakeProcesses(keeps_places=keeps_places))
        other, lost = cluster.last.members
        asked = len(other.calls)
        lost.kill()
        until(lambda: len(cluster.updates) == 3)
        assert cluster.updates == [(1, 0, 2), (1, 1, 1), (2, 1, 2)]
        assert [state.missing for state in cluster.states] == [0, 1, 0]
        assert [worker.epoch for worker in cluster.states[-1].workers] == [1, 2]
        asked_next = [method for method, _ in other.calls[asked:] if method != "ping"]
        assert asked_next == ["cut", "part", "offer", "reach", "admit"]
        assert ("offer", (1, 2)) in other.calls
        (spec,) = cluster.processes.specs[-1]
        assert (spec.argument.epoch, spec.argument.epochs[:3]) == (2, (1, 2, 0))  # type: ignore[attr-defined]
        assert not other.killed
        cluster.supervisor.stop()
        cluster.supervisor.join()
        assert all(member.killed for member in cluster.last.members)

    def test_a_worker_that_is_lost_meanwhile_is_replaced_with_it(self) -> None:
        processes = FakeProcesses(keeps_places=True)
        cluster = self.served(processes)
        first, second = cluster.last.members
        processes.silent = {"load"}
        second.kill()
        until(lambda: cluster.last.members[1].awaits("load"))
        processes.silent = set()
        first.kill()
        until(lambda: len(cluster.updates) == 4)
        assert cluster.updates[-1] == (3, 2, 2)
        assert [state.missing for state in cluster.states] == [0, 1, 2, 0]
        assert [worker.epoch for worker in cluster.states[-1].workers] == [3, 3]
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_where_no_other_worker_comes_about_the_epoch_ends(self) -> None:
        processes = FakeProcesses(fails={"c/i.2/decode (PE 1)": OSError("disk")}, keeps_places=True)
        cluster = self.served(processes)
        other, lost = cluster.last.members
        lost.kill()
        until(lambda: cluster.updates[-1] == (3, 2, 2))
        assert other.killed
        assert [worker.epoch for worker in cluster.states[-1].workers] == [3, 3]
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_a_worker_that_has_less_room_than_the_others_is_refused(self) -> None:
        rooms = iter([100, 100, 50, 100, 100])
        processes = FakeProcesses(answers=room_of_each(rooms), keeps_places=True)
        cluster = self.served(processes, "cuda", "nixl")
        cluster.last.members[1].kill()
        until(lambda: cluster.updates[-1] == (3, 2, 2))
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_losses_without_an_end_end_the_cluster(self) -> None:
        processes = FakeProcesses(keeps_places=True)
        cluster = self.served(processes)
        processes.ends_at = "load"
        cluster.last.members[0].kill()
        assert "recovery.max_restarts" in str(cluster.failure.result(30))
        cluster.supervisor.join()
        assert all(member.killed for group in processes.groups for member in group.members)


class TestIsland:
    def test_a_lost_member_ends_the_epoch(self) -> None:
        cluster = Cluster(FakeProcesses())
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        first = cluster.last
        first.members[1].kill()
        until(lambda: len(cluster.updates) == 3)
        assert all(member.killed for member in first.members)
        assert cluster.updates == [(1, 0, 2), (1, 0, 0), (2, 1, 2)]
        assert [spec.argument.epoch for spec in cluster.processes.specs[-1]] == [2, 2]  # type: ignore[attr-defined]
        assert "stop" not in [method for method, _ in first.members[0].calls]
        cluster.supervisor.stop()
        cluster.supervisor.join()
        assert "stop" in [method for method, _ in cluster.last.members[0].calls]

    def test_the_gateway_hears_which_workers_are_cut_off(self) -> None:
        """Nothing else tells it: their connections stay open."""
        cluster = Cluster(FakeProcesses())
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        cluster.last.members[1].silent_for = RECOVERY.cut_off_seconds + 1
        until(lambda: len(cluster.updates) == 3)
        assert [state.cut_off for state in cluster.states] == [frozenset(), frozenset({1}), frozenset()]
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_who_is_cut_off_while_survivors_are_left_is_told_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Requests of a worker whose host is silent do not end by themselves."""
        cluster = Cluster(FakeProcesses(), RECOVERY.model_copy(update={"drain_seconds": 60.0}))
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        lost, silent = cluster.last.members
        monkeypatch.setitem(ANSWERS, "placed_tokens", 1)
        lost.kill()
        until(lambda: "placed_tokens" in [method for method, _ in cluster.gateway.calls])
        assert [state.cut_off for state in cluster.states] == [frozenset(), frozenset()]
        silent.silent_for = RECOVERY.silent_seconds + 1
        until(lambda: len(cluster.updates) == 3)
        assert [state.cut_off for state in cluster.states] == [frozenset(), frozenset(), frozenset({1})]
        assert not silent.killed
        monkeypatch.setitem(ANSWERS, "placed_tokens", 0)
        until(lambda: silent.killed)
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_the_next_epoch_takes_the_places_of_the_one_before(self) -> None:
        cluster = Cluster(FakeProcesses(keeps_places=True))
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        first = list(cluster.last.members)
        first[1].kill()
        until(lambda: len(cluster.updates) == 3)
        assert all(member.killed for member in first)
        assert cluster.updates == [(1, 0, 2), (1, 0, 0), (2, 1, 2)]
        assert [spec.argument.epoch for spec in cluster.processes.specs[-1]] == [2, 2]  # type: ignore[attr-defined]
        assert len(cluster.processes.groups) == 1
        cluster.supervisor.stop()
        cluster.supervisor.join()
        assert all(member.killed for member in cluster.last.members)

    def test_places_in_which_no_island_came_about_are_given_back(self) -> None:
        processes = FakeProcesses(fails={"c/i.2/decode (PE 1)": OSError("disk")}, keeps_places=True)
        cluster = Cluster(processes)
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        (first,) = processes.groups
        first.members[0].kill()
        until(lambda: cluster.updates[-1] == (3, 2, 2))
        assert len(processes.groups) == 2
        assert all(member.killed for member in first.members)
        cluster.supervisor.stop()
        cluster.supervisor.join()

    @pytest.mark.parametrize("keeps_places", [False, True])
    @pytest.mark.parametrize("at", ["progress", "load"])
    def test_a_worker_that_dies_while_its_island_starts_is_replaced_alone(self, keeps_places: bool, at: str) -> None:
        """Its peers have imported and read weights, and do neither again."""
        processes = FakeProcesses(keeps_places=keeps_places)
        cluster = Cluster(processes)
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        processes.silent = {at}
        cluster.last.members[0].kill()
        until(lambda: all(member.awaits(at) for member in cluster.last.members))
        peer, lost = cluster.last.members
        processes.silent = set()
        lost.kill()
        peer.answer_pending(at, ANSWERS.get(at))
        until(lambda: len(cluster.updates) == 3)
        assert cluster.updates[-1] == (2, 2, 2)
        assert [member is peer for member in cluster.last.members] == [True, False]
        assert cluster.last.members[1].name == "c/i.2/decode (PE 1) again"
        assert [method for method, _ in peer.calls].count("load") == 1
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_a_start_in_which_workers_die_again_and_again_comes_to_an_end(self) -> None:
        processes = FakeProcesses()
        cluster = Cluster(processes)
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        processes.ends_at = "load"
        cluster.last.members[0].kill()
        assert "recovery.max_restarts" in str(cluster.failure.result(30))
        cluster.supervisor.join()
        assert all(member.killed for group in processes.groups for member in group.members)

    def test_survivors_are_left_until_the_gateway_says_so(self) -> None:
        cluster = Cluster(FakeProcesses(), RECOVERY.model_copy(update={"drain_seconds": 60.0}))
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        survivor, lost = cluster.last.members
        cluster.gateway.silent.add("placed_tokens")
        lost.kill()
        until(lambda: cluster.gateway.awaits("placed_tokens"))
        assert not survivor.killed
        cluster.gateway.kill()  # nobody reads any more what survivors generate
        until(lambda: survivor.killed)
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_a_start_that_fails_is_tried_again(self) -> None:
        processes = FakeProcesses(fails={"c/i.2/decode (PE 1)": OSError("disk")})
        cluster = Cluster(processes)
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        cluster.last.members[0].kill()
        until(lambda: cluster.updates[-1] == (3, 2, 2))
        assert len(processes.groups) == 3
        assert all(member.killed for member in processes.groups[1].members)
        cluster.last.members[0].kill()
        assert "recovery.max_restarts" in str(cluster.failure.result(30))
        assert isinstance(cluster.failure.result(), WorkerLost)
        cluster.supervisor.join()
        assert all(member.killed for group in processes.groups for member in group.members)

    def test_an_island_without_room_waits_for_a_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other islands serve on meanwhile, so that must not end the cluster."""
        monkeypatch.setattr(supervisor, "RETRY_SECONDS", 0.01)
        monkeypatch.setattr(supervisor, "LONGEST_RETRY_SECONDS", 0.01)
        cluster = Cluster(FakeProcesses())
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        cluster.processes.room = 0
        cluster.last.members[0].kill()
        until(lambda: len(cluster.updates) > 3 + RECOVERY.max_restarts or cluster.failure.done())
        cluster.processes.room = 2
        until(lambda: cluster.updates[-1][2] == 2 or cluster.failure.done())
        assert not cluster.failure.done()
        assert cluster.updates[-1][1] == 1  # restart
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_the_first_start_is_not_tried_again(self) -> None:
        processes = FakeProcesses(fails={"c/i.1/prefill (PE 0)": OSError("disk")})
        cluster = Cluster(processes)
        cluster.supervisor.start()
        with pytest.raises(StartFailed, match="OSError: disk"):
            cluster.supervisor.ready.result(30)
        cluster.supervisor.join()
        assert len(processes.groups) == 1
        assert not cluster.failure.done()

    def test_an_epoch_has_no_fewer_pages_than_the_one_before(self) -> None:
        """A lost process may still hold memory of its GPU when the next one asks how much is free."""
        cluster = Cluster(FakeProcesses(), device="cuda")
        rooms = iter([64, 64, 40, 64, 90, 90])
        cluster.processes.answers = room_of_each(rooms)
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        cluster.last.members[0].kill()
        until(lambda: cluster.updates[-1] == (3, 2, 2))
        opened = [
            [arguments for method, arguments in group.members[0].calls if method == "open"]
            for group in cluster.processes.groups
        ]
        assert opened == [[(64, LOOPBACK)], [], [(64, LOOPBACK)]]
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_called_off_while_it_starts(self) -> None:
        cluster = Cluster(FakeProcesses())
        start_group = cluster.processes.start_group

        def never_loads(*arguments: object, **options: object) -> FakeGroup:
            group = start_group(*arguments, **options)  # type: ignore[arg-type]
            group.members[0].silent.add("load")
            return group

        cluster.processes.start_group = never_loads  # type: ignore[method-assign]
        cluster.supervisor.start()
        until(lambda: cluster.processes.groups)
        cluster.supervisor.stop()
        cluster.supervisor.join()
        assert all(member.killed for member in cluster.last.members)


class SupervisedGateway:
    """A gateway of two processes, and what comes of it."""

    def __init__(self, processes: FakeProcesses) -> None:
        self.processes = processes
        self.membership = Membership()
        self.released: list[str] = []
        self.orders: list[ScaleOrder] = []
        self.failure: Future[TandemError] = Future()
        config = load_config(None, {"model.path": ".", "gateway.port": 0, "gateway.http_port": 0})
        self.supervisor = GatewaySupervisor(
            processes,
            gateway_settings(config, NO_MODEL),
            GatewayShape(processes=2, num_islands=1, num_pages=known(16)),
            self.membership,
            self.released.append,
            self._scale,
            RECOVERY,
            self.failure.set_result,
        )

    def _scale(self, order: Order) -> Future[ScaleOutcome]:
        assert isinstance(order, ScaleOrder)
        self.orders.append(order)
        outcome: Future[ScaleOutcome] = Future()
        outcome.set_result(ScaleOutcome("i", 2, Shape(1, 1), 2, 0, 0, 0.0))
        return outcome

    @property
    def members(self) -> list[FakeProcess]:
        return self.processes.groups[-1].members

    def table(self, process: int) -> GatewayTable:
        """Opens the table as a process of the last start sees it."""
        settings: Any = self.processes.specs[0][process].argument
        return open_table(settings.table, 2, 1, process, settings.peer_token)


@pytest.fixture(params=[False, True])
def gateway(request: pytest.FixtureRequest) -> Iterator[SupervisedGateway]:
    """Runs a gateway whose places are kept, or are gone."""
    gateway = SupervisedGateway(FakeProcesses(keeps_places=request.param))
    gateway.supervisor.start()
    gateway.supervisor.ready.result(30)
    yield gateway
    gateway.supervisor.stop()
    gateway.supervisor.join()
    assert all(member.killed for group in gateway.processes.groups for member in group.members)


def called(process: FakeProcess, method: str) -> int:
    return [name for name, _ in process.calls].count(method)


class TestGateway:
    def test_a_lost_process_is_started_again_alone(self, gateway: SupervisedGateway) -> None:
        gateway.membership.update("i", 1, 0, ())
        staying, lost = gateway.members
        for process, value in ((0, 5), (1, 7)):
            gateway.table(process).put(Column.CALLS, value)
        assert gateway.table(0).total(Column.CALLS) == 12
        lost.kill()
        until(lambda: len(gateway.processes.specs) == 2)
        until(lambda: called(gateway.members[1], "update_island"))
        assert len(gateway.processes.groups) == 1
        assert gateway.members[0] is staying
        assert not staying.killed
        first: Any = gateway.processes.specs[0][1].argument
        ((spec,),) = gateway.processes.specs[1:]
        again: Any = spec.argument
        assert (again.process, again.incarnation) == (1, 2)
        assert 0 not in (again.port, again.http_port)
        assert (again.port, again.http_port, again.table) == (first.port, first.http_port, first.table)
        assert gateway.released == ["0-1.1."]
        assert gateway.table(0).total(Column.CALLS) == 5
        assert gateway.table(0).total(Column.RESTARTS) == 1
        assert not gateway.failure.done()

    def test_all_hear_of_the_islands_and_all_are_asked_what_runs_there(self, gateway: SupervisedGateway) -> None:
        for call in gateway.membership.update("i", 1, 0, ()):
            call.result(30)
        assert [called(member, "update_island") for member in gateway.members] == [1, 1]
        assert len(gateway.membership.ask_placed_tokens("i")) == 2
        gateway.members[0].kill()
        until(lambda: len(gateway.processes.specs) == 2)
        until(lambda: len(gateway.membership.ask_placed_tokens("i")) == 2)

    @pytest.mark.parametrize("process", [0, 1])
    def test_an_order_is_taken_from_any_process_also_after_a_loss(
        self, gateway: SupervisedGateway, process: int
    ) -> None:
        other, member = gateway.members[1 - process], gateway.members[process]
        other.kill()
        until(lambda: len(gateway.processes.specs) == 2)
        order = ScaleOrder(1, "", 1, 1)
        member.answer_pending("next_order", order)
        until(lambda: called(member, "answer_order"))
        assert gateway.orders == [order]
        until(lambda: called(member, "next_order") == 2)

    def test_its_ports_are_held_until_it_is_stopped(self, gateway: SupervisedGateway) -> None:
        settings: Any = gateway.processes.specs[0][0].argument
        for port in (settings.port, settings.http_port):
            with pytest.raises(StartFailed, match=f"port {port} on 127.0.0.1 cannot be opened"):
                SharedPorts("127.0.0.1", port, None)
        gateway.supervisor.stop()
        gateway.supervisor.join()
        SharedPorts("127.0.0.1", settings.port, settings.http_port).close()

    def test_who_cannot_be_stopped_is_ended(self, gateway: SupervisedGateway) -> None:
        one, other = gateway.members
        one.fails["stop"] = AttributeError("it was never started whole")
        gateway.supervisor.stop()
        gateway.supervisor.join()
        assert called(other, "stop") == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_that_another_program_has_is_refused(shared: bool) -> None:
    """Though it shares the port, and ours would."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=shared) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartFailed, match=rf"gateway\.http_port {port} on 127\.0\.0\.1 cannot be opened"):
            SharedPorts("127.0.0.1", 0, port)


def test_names_of_islands() -> None:
    config: ClusterConfig = load_config(None, {"name": "c", "num_islands": 3})
    assert [island_name(config, number) for number in range(3)] == ["c-0", "c-1", "c-2"]
    assert [island_name(load_config(None, {"name": "c"}), number) for number in range(3)] == ["c", "c-1", "c-2"]
