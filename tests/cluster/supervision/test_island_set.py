"""Islands come and go while a cluster runs: with scripted processes."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from tandem.cluster.config.cluster_config import ClusterConfig, load_config
from tandem.cluster.errors import InvalidRequest, ScaleRefused, TandemError
from tandem.cluster.routing.membership import IslandState, Membership
from tandem.cluster.scaling import ScaleOrder, ScaleOutcome, Shape
from tandem.cluster.supervision.island import Island
from tandem.cluster.supervision.island_set import IslandSet
from tandem.transfer.endpoint import LOOPBACK
from tests.cluster.fake_processes import FakeGroup, FakeProcess, FakeProcesses, no_answer, room_of_each
from tests.support.waiting import until


class Scene:
    """A set of islands over fake processes, and what a gateway hears of them."""

    def __init__(self, answers: Callable[[str], Any] = no_answer, **settings: object) -> None:
        values = {"name": "c", "model.path": ".", "recovery.drain_seconds": 0.3, "scaling.max_islands": 4}
        self.processes = FakeProcesses(answers=answers)
        self.membership = Membership()
        self.gateway = FakeProcess("gateway")
        self.failure: Future[TandemError] = Future()
        config = load_config(None, values | settings)
        self.set = IslandSet(config, partial(self._island, config), self.membership, self.failure.set_result)
        self.set.start()
        for one in self.set.all:
            one.ready.result(30)
        self.membership.attach(self.gateway)

    def _island(self, config: ClusterConfig, name: str, epoch: int, shape: Shape) -> Island:
        return Island(self.processes, config, 64, name, epoch)

    def scale(self, number: int) -> ScaleOutcome:
        return self.set.scale(ScaleOrder(1, "", None, None, number)).result(30)

    @property
    def names(self) -> list[str]:
        return [one.island_name for one in self.set.all]

    @property
    def heard(self) -> list[tuple[str, int, bool]]:
        """Name of the island, its workers, whether it is gone: of each update."""
        states = [arguments[0] for method, arguments in self.gateway.calls if method == "update_island"]
        return [(state.name, len(state.workers), state.gone) for state in states if isinstance(state, IslandState)]


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.set.stop()
    assert all(member.killed for group in made.processes.groups for member in group.members)


def test_islands_are_added_and_the_newest_go_first(scene: Scene) -> None:
    grown = scene.scale(3)
    assert (grown.num_islands, grown.kept, grown.started, grown.ended) == (3, 1, 2, 0)
    assert scene.names == ["c", "c-1", "c-2"]
    number = scene.membership._states["c-2"].number  # islands get theirs in the order in which they serve
    shrunk = scene.scale(2)
    assert (shrunk.num_islands, shrunk.kept, shrunk.started, shrunk.ended) == (2, 2, 0, 1)
    assert scene.names == ["c", "c-1"]
    assert scene.heard[-2:] == [("c-2", 0, False), ("c-2", 0, True)]
    assert scene.scale(3).started == 1
    assert scene.heard[-1] == ("c-2", 2, False), "its name is taken again"
    assert scene.membership._states["c-2"].number == number
    assert scene.scale(3).started == 0


def test_an_island_that_goes_finishes_what_it_can_first(scene: Scene) -> None:
    scene.scale(2)
    scene.gateway.silent.add("placed_tokens")
    change = scene.set.scale(ScaleOrder(1, "", None, None, 1))
    until(lambda: scene.gateway.awaits("placed_tokens"))
    last = scene.processes.groups[-1].members
    assert not any(member.killed for member in last)
    scene.gateway.answer_pending("placed_tokens", 0)
    change.result(30)
    assert all("stop" in [method for method, _ in member.calls] for member in last)


def test_new_islands_have_as_many_pages_as_the_others() -> None:
    """The gateway admits requests by that number: with less room there is no island, with more it is not used."""
    rooms = room_of_each(iter([64, 64, 40, 64, 90, 90]))
    scene = Scene(rooms, **{"island.device": "cuda", "island.transport": "nvshmem"})
    with pytest.raises(ScaleRefused, match="there is room for 40 pages; the island had 64 before"):
        scene.scale(2)
    assert scene.scale(2).started == 1
    opened = [[arguments for method, arguments in group.members[0].calls if method == "open"]
              for group in scene.processes.groups]  # fmt: skip
    assert opened == [[(64, LOOPBACK)], [], [(64, LOOPBACK)]]
    scene.set.stop()


def test_what_cannot_be_started_changes_nothing(scene: Scene) -> None:
    scene.processes.fails["c/c-2.1/decode (PE 1)"] = OSError("disk")
    with pytest.raises(ScaleRefused, match="the islands keep serving as before: OSError: disk"):
        scene.scale(3)
    assert scene.names == ["c"]
    assert not scene.failure.done()
    assert all(member.killed for group in scene.processes.groups[1:] for member in group.members)
    scene.processes.fails.clear()
    assert scene.scale(2).started == 1


@pytest.mark.parametrize("number", [0, 5])
def test_numbers_out_of_range(scene: Scene, number: int) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"num_islands is {number}; it must be from 1 to 4 \(scaling.max_islands\)"
    ):
        scene.scale(number)


def test_one_change_at_a_time(scene: Scene) -> None:
    scene.scale(2)
    scene.gateway.silent.add("placed_tokens")
    first = scene.set.scale(ScaleOrder(1, "", None, None, 1))
    with pytest.raises(ScaleRefused, match="is changing already"):
        scene.scale(3)
    assert first.result(30).num_islands == 1


def test_a_set_that_stops_while_it_grows(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    start_group = scene.processes.start_group

    def never_loads(*arguments: object, **options: object) -> FakeGroup:
        group = start_group(*arguments, **options)  # type: ignore[arg-type]
        group.members[0].silent.add("load")
        return group

    monkeypatch.setattr(scene.processes, "start_group", never_loads)
    change = scene.set.scale(ScaleOrder(1, "", None, None, 4))
    until(lambda: len(scene.processes.groups) == 4)
    scene.set.stop()
    with pytest.raises(ScaleRefused, match="the cluster stops"):
        change.result(30)
    assert not scene.set.all
