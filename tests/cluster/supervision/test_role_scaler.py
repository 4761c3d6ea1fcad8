"""The policy of roles at work: on counts as the gateway keeps them, with islands that the test makes."""

import math
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ScaleRefused
from tandem.cluster.metrics import series
from tandem.cluster.metrics.cells import Recorder
from tandem.cluster.peers.table import Column, GatewayFile, GatewayTable
from tandem.cluster.processes.placement import ANYWHERE
from tandem.cluster.routing.membership import Membership
from tandem.cluster.routing.worker_link import WorkerAddress
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome, ScalingState, Shape
from tandem.cluster.supervision.autoscaling.autoscaler import Autoscaler, IslandRoom
from tandem.cluster.supervision.autoscaling.load_meter import LoadMeter
from tandem.cluster.supervision.autoscaling.role_meter import RoleMeter
from tandem.cluster.supervision.autoscaling.role_policy import RoleLoad
from tandem.cluster.supervision.autoscaling.role_scaler import RoleScaler
from tandem.cluster.supervision.autoscaling.scaling_policy import Load
from tests.cluster.supervision.test_autoscaler import Hosts

SETTINGS: dict[str, Any] = {
    "cache.page_size": 16,
    "scaling.max_islands": 4,
    "scaling.max_workers": 4,
    "scaling.queue_seconds": 2.0,
    "scaling.up_after_seconds": 5.0,
    "scaling.down_after_seconds": 20.0,
    "scaling.cooldown_seconds": 10.0,
}
PAGES = 10


class Islands:
    """One, c, which changes when the test says so. orders: islands that should be, or a shape of c."""

    count = 1
    is_reshaping = False

    def __init__(self, membership: Membership) -> None:
        self.orders: list[int | Shape] = []
        self.pending: Future[ScaleOutcome] | None = None
        self._membership = membership

    @property
    def is_changing(self) -> bool:
        return self.pending is not None and isinstance(self.orders[-1], int)

    def scale(self, order: ScaleOrder) -> Future[ScaleOutcome]:
        shape = Shape(order.num_prefill or 0, order.num_decode or 0)
        self.orders.append(order.num_islands or shape)
        assert order.island == ("" if order.num_islands else "c")
        self.pending = Future()
        return self.pending

    def form(self, prefill: int, decode: int, missing: int = 0, leaving: Collection[int] = ()) -> None:
        """The island serves in that shape; with none it does not. missing: workers that are being replaced. leaving:
        PEs of workers that are to leave it."""
        roles = Shape(prefill, decode).roles[: prefill + decode - missing]
        workers = tuple(WorkerAddress(role, pe, f"127.0.0.1:{pe + 1}", "token") for pe, role in enumerate(roles))
        self._membership.update("c", 1, 0, workers, missing=missing, leaving=frozenset(leaving))

    def end(self, error: Exception | None = None) -> None:
        pending, self.pending = self.pending, None
        assert pending is not None
        if error is not None:
            pending.set_exception(error)
        else:
            pending.set_result(ScaleOutcome("", 0, Shape(1, 1), 0, 0, 0, 0.0, 0))


class Scene:
    def __init__(self) -> None:
        config = load_config(None, SETTINGS)
        self.now = 0.0
        self.table, membership = GatewayTable.alone(), Membership()
        self.recorder = Recorder(series.LAYOUT, self.table.lasting(0))
        self.islands = Islands(membership)
        self.islands.form(1, 1)
        self.said = ""
        clock = self.clock
        self.roles = RoleScaler(config, self.table, membership, lambda: PAGES, clock)
        meter = LoadMeter(self.table, config.scaling.up_after_seconds, clock)
        room = IslandRoom(Hosts(), config, ANYWHERE)
        self.scaler = Autoscaler(config, self.islands, meter, room, self.tell, clock, self.roles)

    def clock(self) -> float:
        return self.now

    def tell(self, state: ScalingState) -> None:
        self.said = state.waits_for

    def look(self, seconds: int, *, waiting: int = 0) -> None:
        """Once a second, in which one request is placed of those that wait."""
        self.table.put(Column.QUEUED, waiting)
        for _ in range(seconds):
            self.now += 1
            self.recorder.add(series.RESERVATIONS, min(1, waiting))
            self.recorder.add(series.GENERATION_TOKENS, 10 * min(1, waiting))
            self.scaler.look()


def test_no_island_gets_another_shape_while_a_worker_is_replaced() -> None:
    """It seems to have fewer workers then. Another island helps at once."""
    scene = Scene()
    scene.islands.form(1, 2)
    scene.look(5, waiting=30)
    scene.islands.form(1, 2, missing=1)
    scene.look(60, waiting=30)
    assert scene.islands.orders == [2]


def test_an_island_that_a_worker_is_about_to_leave_gets_no_other_shape() -> None:
    scene = Scene()
    scene.islands.form(1, 2, leaving={2})
    scene.look(60, waiting=30)
    assert scene.islands.orders == [2], "another island helps at once"


def test_a_worker_comes_before_an_island_and_goes_behind_it() -> None:
    scene = Scene()
    scene.look(16, waiting=30)
    assert scene.islands.orders == [Shape(1, 2)]
    assert scene.said == "island c forms anew with 1 prefill and 2 decode workers"
    scene.look(60, waiting=30)
    assert scene.islands.orders == [Shape(1, 2)], "one change at a time"
    scene.islands.form(1, 2)
    scene.islands.end()
    scene.look(20, waiting=30)
    assert scene.islands.orders[1:] == [Shape(1, 3)]
    scene.islands.form(1, 3)
    scene.islands.end()
    scene.look(20, waiting=30)
    assert scene.islands.orders[2:] == [2], "an island has max_workers"
    scene.islands.count = 2
    scene.islands.end()
    scene.look(40)
    assert scene.islands.orders[3:] == [1]
    scene.islands.count = 1
    scene.islands.end()
    scene.look(60)
    assert scene.islands.orders[4:] == [Shape(1, 1)]


def test_an_island_that_is_refused_workers_gets_another_beside_it() -> None:
    scene = Scene()
    scene.look(16, waiting=30)
    scene.islands.end(ScaleRefused("the island keeps serving as before: no room"))
    scene.look(2, waiting=30)
    assert scene.said == "the island keeps serving as before: no room"
    scene.look(18, waiting=30)
    assert scene.islands.orders == [Shape(1, 2), 2]


def test_an_order_that_is_refused_at_once_is_given_again_behind_the_cooldown() -> None:
    scene = Scene()
    scene.islands.form(1, 2)
    scene.look(21)
    for orders in (1, 2, 3):
        assert scene.islands.orders == [Shape(1, 1)] * orders
        scene.islands.end(ScaleRefused("the island keeps serving as before"))
        scene.look(19)
        assert scene.said == "the island keeps serving as before"
        scene.look(3)


def test_an_island_that_starts_again_or_changes_by_hand_is_left_alone() -> None:
    scene = Scene()
    scene.islands.form(0, 0)
    for _ in range(20):
        scene.roles.look(Load())
    scene.islands.form(1, 1)
    scene.islands.is_reshaping = True
    scene.scaler.look()
    scene.look(9, waiting=30)
    scene.islands.is_reshaping = False
    assert scene.islands.orders == [2], "islands are another matter"
    scene.islands.end()
    scene.islands.form(2, 2)
    scene.look(10, waiting=30)
    assert scene.islands.orders == [2]
    scene.look(5, waiting=30)
    assert scene.islands.orders[1:] == [Shape(1, 3)]


def test_the_meter_knows_what_each_role_has_to_do() -> None:
    now, file, membership = [0.0], GatewayFile(1, 2), Membership()
    table = file.table
    file.close()
    membership.update("b", 1, 0, ())  # so the other one is the second
    Islands(membership).form(2, 1)
    meter = RoleMeter(table, 10.0, lambda: now[0])
    load = Load(0.0, 0.3, 0.02, 300.0, 100.0, 5.0)
    seen = RoleLoad()
    for second in range(40):
        now[0] = float(second)
        busy = second >= 30  # the window's half
        table.put(Column.QUEUED, 20 if busy else 0)
        table.put(table.placed_columns(1, 0)[1], 1000 if busy else 0)
        table.put(table.placed_columns(1, 2)[0], 2000)
        seen = meter.read(load, membership.islands, 4000)
    late = 10 / 11
    expected = RoleLoad(20 / 5 * late, 1000 / 200 * late, 0.3, 0.02, 200.0, 100.0, 0.5 * late, 0.5, 0.5 * late)
    assert astuple(seen) == pytest.approx(astuple(expected))
    table.put_far(table.placed)
    meter.restart()
    assert meter.read(load, membership.islands, 4000).decode_use == 1.0, "gateways of other hosts count"
    assert meter.read(Load(), membership.islands, 4000).prefill_seconds == math.inf
