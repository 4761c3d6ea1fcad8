"""Tests where RayGroup puts processes, and which placement groups it gives back, with a Ray that only takes notes."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.errors import NoRoom, StartFailed
from tandem.cluster.processes import ray_group
from tandem.cluster.processes.loss import Loss
from tandem.cluster.processes.processes import ActorSpec
from tandem.cluster.processes.ray_group import RayActor, RayGroup


@dataclass(eq=False)
class Actor:
    name: str
    host: str
    lease: None = None
    killed: bool = False

    def there(self) -> Future[None]:
        return Future()

    def kill(self) -> None:
        self.killed = True


@dataclass
class Ray:
    placed: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def place(self, bundles: Sequence[dict[str, float]], names: Sequence[str], _: float) -> list[str]:
        self.placed += zip(names, bundles, strict=True)
        return list(names)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Ray:
    noted = Ray()
    monkeypatch.setattr(ray_group, "place", noted.place)
    monkeypatch.setattr(ray_group, "remove_placement_group", noted.removed.append)
    monkeypatch.setattr(RayGroup, "_start", lambda _self, spec, _placed, _threads, host: Actor(spec.name, host))
    monkeypatch.setattr(RayGroup, "_end", lambda _self, _members: True)
    return noted


def group(choose_hosts: Any = None, check_growth: Any = lambda _now, _more: None) -> RayGroup:
    loss = SimpleNamespace(check=lambda: None, reason="", when_there=lambda then: then())
    ties: Any = SimpleNamespace(loss=loss, leases=SimpleNamespace(drop=lambda _: None))
    return RayGroup({"CPU": 0.1, "GPU": 1}, "a", ties, check_growth, choose_hosts)


def worker(number: int, ranks: int) -> list[ActorSpec]:
    return [ActorSpec(f"{number}.{rank}", object, None, place=f"worker {number}") for rank in range(ranks)]


def test_the_ranks_of_a_worker_share_a_bundle_and_a_host(noted: Ray) -> None:
    one = group()
    one.start([*worker(0, 1), *worker(1, 3)], ["a", "b"], threads=1, seconds=1)
    assert [(name, needs["CPU"], needs["GPU"]) for name, needs in noted.placed] == [("0.0", 0.1, 1), ("1.0", 0.3, 3)]
    assert [member.host for member in one.members] == ["a", "b", "b", "b"]


def test_a_bundle_is_given_back_with_its_last_process(noted: Ray) -> None:
    one = group()
    first, *others = one.start(worker(0, 3), ["a"], threads=1, seconds=1)
    one.shrink([first])
    assert noted.removed == []
    one.shrink(others)
    assert noted.removed == ["0.0"]
    assert one.members == []


def test_more_than_hosts_could_ever_hold_are_refused_before_a_host_is_asked(noted: Ray) -> None:
    asked: list[tuple[int, int]] = []

    def check(now: int, more: int) -> None:
        asked.append((now, more))
        if now + more > 3:
            raise NoRoom("at most 3 fit")

    one = group(pytest.fail, check)
    one.start(worker(0, 2), ["a"], threads=1, seconds=1)
    with pytest.raises(NoRoom, match="at most 3"):
        one.grow(worker(1, 2), threads=1)
    assert asked == [(2, 2)]
    assert len(noted.placed) == 1


def test_those_that_join_go_where_a_host_has_room_for_all_ranks(noted: Ray) -> None:
    asked: list[dict[str, float]] = []

    def choose(needs: Sequence[dict[str, float]], deadline: float) -> list[str]:
        asked.extend(needs)
        return ["a", "b"][: len(needs)]

    grown = group(choose).grow([*worker(1, 2), ActorSpec("lone", object, None)], threads=1)
    assert asked == [{"CPU": 0.2, "GPU": 2}, {"CPU": 0.1, "GPU": 1}]
    assert [member.host for member in grown] == ["a", "a", "b"]


def test_ranks_whose_place_is_gone_get_another_together(noted: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first of them could have stayed."""

    def replace(self: RayGroup, member: Any, spec: ActorSpec) -> Actor:
        if spec.name.endswith(".1"):
            raise StartFailed("its process host does not answer")
        self._placed[started := Actor(spec.name, "a")] = self._placed.pop(member)  # type: ignore[index]
        return started

    monkeypatch.setattr(RayGroup, "replace", replace)
    one = group(lambda needs, deadline: ["b"] * len(needs))
    old = one.start(worker(0, 2), ["a"], threads=1, seconds=1)
    started = one.replace_anywhere(old, worker(1, 2), threads=1)
    assert [(member.name, member.host) for member in started] == [("1.0", "b"), ("1.1", "b")]
    assert one.members == started
    assert noted.removed == ["0.0"]
    assert [needs["CPU"] for _, needs in noted.placed] == [0.2, 0.2]


def test_a_process_is_held_up_while_ray_is_away_and_it_is_not_there() -> None:
    loss, there = Loss(), Future[None]()
    ready = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: there))
    actor = RayActor("worker", SimpleNamespace(ready=ready), loss, "a")
    found = [actor.is_held_up]
    for change in (lambda: loss.interrupt("its GCS is away", 60.0), lambda: there.set_result(None), loss.resume):
        change()
        found.append(actor.is_held_up)
    assert found == [False, True, False, False]


def test_specs_without_a_place_have_one_each(noted: Ray) -> None:
    group().start([ActorSpec(name, object, None) for name in "xy"], ["a", "a"], threads=1, seconds=1)
    assert [name for name, _ in noted.placed] == ["x", "y"]
