"""What is watched, what is started again and how often: with processes that do as told."""

import threading
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import pytest

from tandem.cluster.config import ClusterConfig, RecoverySection, load_config
from tandem.cluster.errors import ProcessEnded, StartFailed, TandemError, WorkerLost
from tandem.cluster.routing.membership import Membership
from tandem.cluster.scaling import Shape
from tandem.cluster.supervision.gateway_supervisor import GatewaySupervisor
from tandem.cluster.supervision.heartbeat import MEETING, MEETING_SECONDS, POLL_SECONDS, Heartbeat
from tandem.cluster.supervision.island import Island
from tandem.cluster.supervision.island_supervisor import IslandSupervisor
from tandem.cluster.supervision.liveness import Liveness
from tandem.cluster.supervision.process_settings import gateway_settings, island_names
from tandem.cluster.supervision.restart_budget import RestartBudget
from tandem.cluster.supervision.stop_signal import Stopping, StopSignal
from tests.cluster.fake_processes import FakeGroup, FakeProcess, FakeProcesses, room_of_each
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
        process = FakeProcess("p", lambda method: ("kernels", 1))
        heartbeat = Heartbeat(process)
        for _ in range(100):
            heartbeat.tick(0.5)
            heartbeat.tell()
        process.silent.add("ping")
        heartbeat.tick(0.5)
        assert [record.message for record in caplog.records] == [
            f"p has made no progress for {seconds} s in phase 'kernels' of its start" for seconds in (15.0, 30.0)
        ]

    def test_who_is_silent_is_told(self, caplog: pytest.LogCaptureFixture) -> None:
        process = FakeProcess("p")
        heartbeat = Heartbeat(process)
        process.silent.add("ping")
        for _ in range(40):
            heartbeat.tick(0.5)
            heartbeat.tell()
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


class TestLiveness:
    def test_an_end_is_told(self) -> None:
        members = [FakeProcess("a"), FakeProcess("b")]
        liveness = Liveness(members[:1], PATIENT, StopSignal())
        liveness.add(members[1:])
        threading.Timer(0.05, members[1].kill).start()
        with pytest.raises(ProcessEnded, match="b ended"):
            liveness.results([Future()], 60)

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

    def test_called_off(self) -> None:
        stop = StopSignal()
        threading.Timer(0.05, stop.call_off).start()
        with pytest.raises(Stopping):
            Liveness([FakeProcess("a")], PATIENT, stop).results([Future()], 60)


class Cluster:
    """One supervised island of a prefill and a decode worker, and a gateway that notes what it is told."""

    def __init__(self, processes: FakeProcesses, recovery: RecoverySection = RECOVERY, device: str = "cpu") -> None:
        self.processes = processes
        transport = {"cpu": "shared_memory", "cuda": "nvshmem"}[device]
        values = {"name": "c", "model.path": ".", "island.device": device, "island.transport": transport}
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
        return Island(self.processes, config, 64, "i", epoch)

    @property
    def told(self) -> list[tuple[int, int, int]]:
        """(epoch, restarts, number of workers) as the gateway was told."""
        states = [arguments[0] for method, arguments in self.gateway.calls if method == "update_island"]
        return [(state.epoch, state.restarts, len(state.workers)) for state in states]  # type: ignore[attr-defined]

    @property
    def last(self) -> FakeGroup:
        return self.processes.groups[-1]


class TestIsland:
    def test_a_lost_member_ends_the_epoch(self) -> None:
        cluster = Cluster(FakeProcesses())
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        first = cluster.last
        first.members[1].kill()
        until(lambda: len(cluster.told) == 3)
        assert all(member.killed for member in first.members)
        assert cluster.told == [(1, 0, 2), (1, 0, 0), (2, 1, 2)]
        assert [spec.argument.epoch for spec in cluster.processes.specs[-1]] == [2, 2]  # type: ignore[attr-defined]
        assert "stop" not in [method for method, _ in first.members[0].calls]
        cluster.supervisor.stop()
        cluster.supervisor.join()
        assert "stop" in [method for method, _ in cluster.last.members[0].calls]

    def test_the_next_epoch_takes_the_places_of_the_one_before(self) -> None:
        cluster = Cluster(FakeProcesses(keeps_places=True))
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        first = list(cluster.last.members)
        first[1].kill()
        until(lambda: len(cluster.told) == 3)
        assert all(member.killed for member in first)
        assert cluster.told == [(1, 0, 2), (1, 0, 0), (2, 1, 2)]
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
        until(lambda: cluster.told[-1] == (3, 2, 2))
        assert len(processes.groups) == 2
        assert all(member.killed for member in first.members)
        cluster.supervisor.stop()
        cluster.supervisor.join()

    def test_survivors_are_left_until_the_gateway_says_so(self) -> None:
        cluster = Cluster(FakeProcesses(), RECOVERY.model_copy(update={"drain_seconds": 60.0}))
        cluster.supervisor.start()
        cluster.supervisor.ready.result(30)
        survivor, lost = cluster.last.members
        cluster.gateway.silent.add("placed_tokens")
        lost.kill()
        until(lambda: "placed_tokens" in [method for method, _ in cluster.gateway.calls])
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
        until(lambda: cluster.told[-1] == (3, 2, 2))
        assert len(processes.groups) == 3
        assert all(member.killed for member in processes.groups[1].members)
        cluster.last.members[0].kill()
        assert "recovery.max_restarts" in str(cluster.failure.result(30))
        assert isinstance(cluster.failure.result(), WorkerLost)
        cluster.supervisor.join()
        assert all(member.killed for group in processes.groups for member in group.members)

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
        until(lambda: cluster.told[-1] == (3, 2, 2))
        opened = [
            [arguments for method, arguments in group.members[0].calls if method == "open"]
            for group in cluster.processes.groups
        ]
        assert opened == [[(64,)], [], [(64,)]]
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


class TestGateway:
    @pytest.mark.parametrize("keeps_places", [False, True])
    def test_the_next_has_the_ports_and_hears_of_the_islands(self, keeps_places: bool) -> None:
        processes, membership, released = FakeProcesses(keeps_places=keeps_places), Membership(), []
        config = load_config(None, {"model.path": ".", "gateway.port": 0, "gateway.http_port": 0})
        failure: Future[TandemError] = Future()
        supervisor = GatewaySupervisor(
            processes,
            gateway_settings(config, 64, 8),
            membership,
            released.append,
            lambda order: Future(),
            RECOVERY,
            failure.set_result,
        )
        supervisor.start()
        supervisor.ready.result(30)
        membership.update("i", 1, 0, ())
        processes.groups[-1].members[0].kill()
        until(lambda: len(processes.specs) == 2)
        until(lambda: "update_island" in [method for method, _ in processes.groups[-1].members[0].calls])
        assert len(processes.groups) == (1 if keeps_places else 2)
        (gateway,) = processes.groups[-1].members
        gateway.fails["stop"] = AttributeError("it was never started whole")
        ((spec,),) = processes.specs[1:]
        settings: Any = spec.argument
        assert (settings.port, settings.http_port, settings.incarnation) == (1, 2, 2)
        assert released == ["1."]
        supervisor.stop()
        supervisor.join()
        assert gateway.killed
        assert not failure.done()


def test_names_of_islands() -> None:
    config: ClusterConfig = load_config(None, {"name": "c", "num_islands": 3})
    assert island_names(config) == ["c-0", "c-1", "c-2"]
    assert island_names(load_config(None, {"name": "c"})) == ["c"]
