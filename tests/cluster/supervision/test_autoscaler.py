"""The scaling policy at work: on counts as the gateway keeps them, with islands and hosts that the test makes."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ScaleRefused, StartFailed
from tandem.cluster.metrics import series
from tandem.cluster.metrics.cells import Recorder
from tandem.cluster.peers.table import Column, GatewayTable
from tandem.cluster.processes.placement import ANYWHERE, Where
from tandem.cluster.routing.membership import Membership
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome, ScalingState, Shape
from tandem.cluster.supervision.autoscaling.autoscaler import Autoscaler, IslandRoom
from tandem.cluster.supervision.autoscaling.load_meter import LoadMeter
from tandem.cluster.supervision.autoscaling.scaling_policy import Load
from tests.cluster.fake_processes import FakeProcess, FakeProcesses

SETTINGS: dict[str, Any] = {
    "island.num_decode": 3,
    "scaling.max_islands": 8,
    "scaling.queue_seconds": 2.0,
    "scaling.up_after_seconds": 5.0,
    "scaling.down_after_seconds": 20.0,
    "scaling.cooldown_seconds": 10.0,
}


@dataclass
class Hosts(FakeProcesses):
    """Processes with room for `free` more islands. asked: for how many, of how many processes and GPUs each."""

    free: int = 100
    lost: bool = False
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def free_places(self, most: int, places: Sequence[int], *, gpus: int, where: Where = ANYWHERE) -> int:
        if self.lost:
            raise StartFailed("Ray has no node any more")
        return min(most, self.free)

    def ask_for_places(self, groups: int, places: Sequence[int], *, gpus: int, where: Where = ANYWHERE) -> None:
        self.asked.append((groups, sum(places), gpus))


class IslandsByHand:
    """Islands whose changes end when the test says so."""

    def __init__(self) -> None:
        self.count = 1
        self.orders: list[int] = []
        self.pending: Future[ScaleOutcome] | None = None

    @property
    def is_changing(self) -> bool:
        return self.pending is not None

    is_reshaping = False

    def scale(self, order: ScaleOrder) -> Future[ScaleOutcome]:
        assert order.num_islands is not None
        self.orders.append(order.num_islands)
        self.pending = Future()
        return self.pending

    def end(self, error: Exception | None = None) -> None:
        pending, self.pending = self.pending, None
        assert pending is not None
        if error is not None:
            pending.set_exception(error)
            return
        self.count = self.orders[-1]
        pending.set_result(ScaleOutcome("", 0, Shape(1, 1), 0, 0, 0, 0.0, self.count))


class Scene:
    def __init__(self, where: Where = ANYWHERE, **settings: object) -> None:
        config = load_config(None, SETTINGS | settings)
        self.now = 0.0
        self.table = GatewayTable.alone()
        self.recorder = Recorder(series.LAYOUT, self.table.lasting(0))
        self.islands, self.hosts = IslandsByHand(), Hosts()
        self.states: list[ScalingState] = []
        self.meter = LoadMeter(self.table, config.scaling.up_after_seconds, self.clock)
        room = IslandRoom(self.hosts, config, where)
        self.scaler = Autoscaler(config, self.islands, self.meter, room, self.states.append, self.clock)

    def clock(self) -> float:
        return self.now

    def look(self, seconds: int, *, waiting: int = 0, placed: int = 1) -> None:
        """Once a second, in which so many requests are placed while others wait."""
        self.table.put(Column.QUEUED, waiting)
        for _ in range(seconds):
            self.now += 1
            self.recorder.add(series.RESERVATIONS, placed)
            self.scaler.look()

    @property
    def state(self) -> tuple[int, str]:
        return self.states[-1].wanted_islands, self.states[-1].waits_for


def test_requests_that_wait_bring_islands_and_idle_ones_end() -> None:
    scene = Scene()
    scene.look(8, waiting=30)
    assert scene.islands.orders == [2]
    assert scene.state == (2, "starting them")
    scene.look(60, waiting=30)
    assert scene.islands.orders == [2], "one change at a time"
    scene.islands.end()
    scene.look(9)
    assert scene.state == (2, "")
    scene.look(40)
    assert scene.islands.orders == [2, 1]
    assert scene.state == (1, "ending the newest")
    scene.islands.end()
    scene.look(60)
    assert scene.islands.orders == [2, 1]
    assert scene.hosts.asked == []


def test_hosts_that_lack_room_are_asked_for_once_and_block_nothing() -> None:
    scene = Scene()
    scene.hosts.free = 0
    scene.look(60, waiting=30)
    assert scene.hosts.asked == [(2, 4, 0)]
    assert scene.islands.orders == []
    assert scene.state == (2, "waiting for hosts with room for 1 of them")
    scene.hosts.free = 1
    scene.look(1, waiting=30)
    assert scene.islands.orders == [2]
    scene.islands.end()
    scene.hosts.free = 1
    scene.look(20, waiting=30)
    assert scene.islands.orders == [2, 3], "as many as have room, of the 4 that it wants"
    assert scene.hosts.asked[1:] == [(4, 4, 0)]
    assert scene.state == (4, "waiting for hosts with room for 1 of them")


def test_a_load_that_wavers_is_not_asked_for_each_second() -> None:
    scene = Scene()
    scene.islands.count = 4
    scene.hosts.free = 0
    scene.look(12)
    for waiting in (35, 25, 30, 25, 35) * 4:
        scene.look(3, waiting=waiting, placed=10)
    assert scene.hosts.asked == sorted(set(scene.hosts.asked)), "only more of them"
    assert scene.hosts.asked[-1] == (7, 4, 0)
    assert scene.state == (7, "waiting for hosts with room for 3 of them")


def test_hosts_that_are_not_wanted_any_more_are_asked_for_no_more() -> None:
    scene = Scene()
    scene.hosts.free = 0
    scene.look(10, waiting=30)
    scene.look(19)
    assert scene.hosts.asked == [(2, 4, 0)], "a short pause takes nothing back"
    assert scene.state == (1, "")
    scene.look(5)
    assert scene.hosts.asked == [(2, 4, 0), (1, 4, 0)]
    scene.scaler.stop()
    assert scene.hosts.asked[2:] == [(0, 4, 0)]
    scene.scaler.stop()
    assert len(scene.hosts.asked) == 3


def test_islands_that_must_be_on_this_host_ask_for_no_other() -> None:
    scene = Scene(Where(here=True), **{"island.device": "cuda", "island.transport": "nvshmem"})
    scene.hosts.free = 0
    scene.look(10, waiting=30)
    assert scene.hosts.asked == []
    assert scene.state == (2, "waiting for hosts with room for 1 of them")


def test_a_refused_order_is_shown_and_tried_again() -> None:
    scene = Scene()
    scene.look(8, waiting=30)
    scene.islands.end(ScaleRefused("the islands keep serving as before: disk"))
    scene.look(9, waiting=30)
    assert scene.islands.orders == [2]
    assert scene.state == (2, "the islands keep serving as before: disk")
    scene.look(10, waiting=30)
    assert scene.islands.orders == [2, 2]


def test_an_order_by_hand_holds_until_the_policy_is_sure_again() -> None:
    scene = Scene()
    scene.look(20)
    scene.islands.scale(ScaleOrder(1, "", None, None, 5))
    scene.look(30)
    scene.islands.end()
    scene.look(19)
    assert scene.islands.orders == [5]
    scene.look(10)
    assert scene.islands.orders == [5, 1]


def test_a_lost_ray_is_no_end_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.hosts.lost = True
    looks = iter([False] * 20)
    monkeypatch.setattr(scene.scaler._stopped, "wait", lambda seconds: next(looks, True))

    def look() -> None:
        scene.now += 1
        scene.table.put(Column.QUEUED, 5)
        Autoscaler.look(scene.scaler)

    monkeypatch.setattr(scene.scaler, "look", look)
    scene.scaler._run()
    assert scene.state == (1, "Ray has no node any more")


def test_a_gateway_process_that_comes_later_is_told() -> None:
    membership, early, late = Membership(), FakeProcess("early"), FakeProcess("late")
    membership.attach(early)
    state = ScalingState(1, 4, 2, "waiting")
    membership.update_scaling(state)
    membership.attach(late)
    for process in (early, late):
        assert ("update_scaling", (state,)) in process.calls


class TestMeter:
    def test_what_came_before_the_window_does_not_count(self) -> None:
        scene = Scene()
        for _ in range(50):
            scene.recorder.observe(series.FIRST_TOKEN, 60.0)
        load = scene.meter.read()
        assert load == Load()
        for number in range(40):
            scene.now += 0.5
            scene.recorder.observe(series.FIRST_TOKEN, 60.0 if number < 25 else 0.5)
            scene.recorder.observe_all(series.GAPS, [0.03, 0.03])
            scene.recorder.add(series.GENERATION_TOKENS, 2)
            scene.recorder.add(series.PROMPT_TOKENS, 8)
            load = scene.meter.read()
        assert load.first_token_seconds == pytest.approx(0.475)
        assert load.token_seconds == pytest.approx(0.029)
        assert load.tokens_per_second == pytest.approx(20)
        assert load.queue_seconds == 0

    def test_few_values_say_nothing(self) -> None:
        scene = Scene()
        scene.meter.read()
        scene.now += 1
        for _ in range(9):
            scene.recorder.observe(series.FIRST_TOKEN, 60.0)
        assert scene.meter.read().first_token_seconds is None

    def test_a_queue_is_as_long_as_the_pace_says(self) -> None:
        scene = Scene()
        scene.meter.read()
        scene.now += 2
        scene.table.put(Column.QUEUED, 12)
        assert scene.meter.read().queue_seconds == math.inf
        scene.recorder.add(series.RESERVATIONS, 6)
        assert scene.meter.read().queue_seconds == 4.0
        scene.meter.restart()
        assert scene.meter.read() == Load()
