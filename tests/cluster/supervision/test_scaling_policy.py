"""Tests the scaling policy on scripted loads, and on those of a simulated cluster. Its clock is the test's."""

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.config.scaling import ScalingSection
from tandem.cluster.supervision.autoscaling.scaling_policy import Load, ScalingPolicy
from tests.cluster.supervision.scaling_targets import SECONDS

CAPACITY = 1000.0  # tokens a second of a simulated island
TARGETS = SECONDS | {"min_islands": 1, "max_islands": 8}
IDLE = Load()
WAITS = Load(queue_seconds=3.0, tokens_per_second=CAPACITY)
GOOD = Load(first_token_seconds=0.2, token_seconds=0.02, tokens_per_second=CAPACITY)


class Scene:
    """A policy and its time. islands: as the policy has asked for, at once."""

    tick = 1.0  # seconds

    def __init__(self, islands: int = 1, **settings: Any) -> None:
        self.now = 1000.0
        self.islands = islands
        self.policy = ScalingPolicy(ScalingSection(**{**TARGETS, **settings}), lambda: self.now)
        self.changes: list[tuple[float, int]] = []

    def see(self, load: Load) -> int:
        self.now += self.tick
        decision = self.policy.desired(load, self.islands)
        if decision.islands != self.islands:
            assert decision.why
            self.changes.append((self.now, decision.islands))
            self.islands = decision.islands
            self.policy.changed()
        return self.islands

    def see_for(self, seconds: float, load: Load) -> int:
        for _ in range(int(seconds)):
            self.see(load)
        return self.islands


class Simulation(Scene):
    """Islands that do CAPACITY tokens a second each, before which requests wait. rate: tokens a second that come."""

    tick = 5.0

    def __init__(self, islands: int = 1, *, seed: int = 0, noise: float = 0.0, **settings: Any) -> None:
        super().__init__(islands, **settings)
        self.backlog = 0.0
        self._draw = random.Random(seed)
        self._noise = noise

    def run(self, seconds: float, rate: Callable[[float], float]) -> None:
        for _ in range(int(seconds / self.tick)):
            can = CAPACITY * self.islands * self.tick
            came = rate(self.now) * self._draw.uniform(1 - self._noise, 1 + self._noise) * self.tick
            done = min(can, self.backlog + came)
            self.backlog += came - done
            busy = min(0.99, done / can)
            waits = self.backlog / can * self.tick
            first = min(80.0, 0.1 / (1 - busy) + waits) if done else None
            self.see(Load(waits, first, 0.02 + 0.03 * busy if done else None, done / self.tick))


@pytest.mark.parametrize(
    ("load", "named"),
    [
        (Load(queue_seconds=3.0), "first tokens take 3 s; scaling.first_token_seconds is 1"),
        (Load(queue_seconds=math.inf), "requests wait for room inf s; scaling.queue_seconds is 2"),
        (Load(first_token_seconds=1.5), "first tokens take 1.5 s; scaling.first_token_seconds is 1"),
        (Load(token_seconds=0.15), "tokens take 0.15 s; scaling.token_seconds is 0.1"),
    ],
)
def test_a_missed_target_of_any_kind_starts_islands_once_it_is_sure(load: Load, named: str) -> None:
    scene = Scene()
    assert scene.see_for(29, load) == 1
    scene.now += 2
    decision = scene.policy.desired(load, 1)
    assert decision.islands == 2
    assert named in decision.why


def test_a_target_that_is_not_given_is_none() -> None:
    scene = Scene(queue_seconds=None, first_token_seconds=None)
    assert scene.see_for(600, WAITS) == 1


def test_waiting_requests_count_for_their_first_tokens() -> None:
    """Under the worst load no first token comes at all."""
    assert Scene(queue_seconds=None).see_for(40, Load(queue_seconds=math.inf)) == 2


def test_one_good_moment_begins_the_wait_anew() -> None:
    scene = Scene()
    for _ in range(20):
        scene.see_for(25, WAITS)
        scene.see(GOOD)
    assert scene.islands == 1


def test_growth_is_by_the_worst_target_and_doubles_at_most() -> None:
    scene = Scene(islands=4)
    scene.see_for(40, Load(first_token_seconds=1.2, tokens_per_second=1.0))
    assert scene.islands == 5
    scene = Scene(islands=3)
    scene.see_for(40, Load(queue_seconds=math.inf))
    assert scene.islands == 6
    scene.see_for(120, Load(queue_seconds=math.inf))
    assert scene.islands == 8, "never more than max_islands"


def test_nothing_happens_until_the_cooldown_is_over() -> None:
    scene = Scene(up_after_seconds=5.0)
    scene.see_for(400, WAITS)
    times = [at for at, _ in scene.changes]
    assert len(times) == 3
    assert all(later - at >= 60 for at, later in itertools.pairwise(times))


def test_an_idle_cluster_shrinks_to_the_least() -> None:
    scene = Scene(islands=6, min_islands=2)
    assert scene.see_for(299, IDLE) == 6
    assert scene.see_for(5, IDLE) == 2
    assert scene.see_for(3000, IDLE) == 2


def test_a_cluster_with_a_queue_or_near_a_target_keeps_its_islands() -> None:
    assert Scene(islands=4).see_for(4000, Load(queue_seconds=0.5)) == 4
    assert Scene(islands=4).see_for(4000, Load(first_token_seconds=0.9, tokens_per_second=5.0)) == 4


def test_an_order_by_hand_holds_until_the_policy_is_sure_again() -> None:
    scene = Scene()
    scene.see_for(250, GOOD)
    scene.islands = 4
    scene.policy.changed()
    assert scene.see_for(299, GOOD) == 4
    assert scene.see_for(5, GOOD) == 3


def test_fewer_islands_than_the_least_are_made_up_for() -> None:
    scene = Scene(islands=1, min_islands=3)
    scene.policy.changed()
    assert scene.see_for(59, IDLE) == 1
    assert scene.see_for(5, IDLE) == 3


@pytest.mark.parametrize("rate", [300.0, 1700.0, 3500.0, 5200.0])
@pytest.mark.parametrize("begin", [1, 5, 8])
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_a_constant_load_settles_and_then_nothing_changes(rate: float, begin: int, noise: float) -> None:
    scene = Simulation(begin, seed=1, noise=noise)
    scene.run(2 * 3600, lambda now: rate)
    settled = scene.now
    scene.run(3 * 3600, lambda now: rate)
    assert [change for change in scene.changes if change[0] > settled] == []
    assert scene.islands * CAPACITY > rate
    assert scene.islands <= math.ceil(rate / (0.75 * CAPACITY)) + 1
    assert scene.backlog < CAPACITY
    turns = [b > a for (_, a), (_, b) in zip([(0.0, begin), *scene.changes], scene.changes, strict=False)]
    assert sum(before != after for before, after in itertools.pairwise(turns)) <= 2, scene.changes


def test_an_overload_brings_islands_and_a_pause_ends_them() -> None:
    scene = Simulation()
    scene.run(600, lambda now: 200.0)
    assert scene.islands == 1
    scene.run(1800, lambda now: 4200.0)
    assert scene.islands >= 5
    assert scene.backlog == 0
    scene.run(1800, lambda now: 0.0)
    assert scene.islands == 1


def test_other_work_than_the_last_overloads_is_learned_anew() -> None:
    """An overload of long prompts has shown that islands do little: that must not keep islands for easy work."""
    scene = Scene(islands=1)
    scene.see_for(31, Load(queue_seconds=3.0, tokens_per_second=10.0))
    assert scene.islands == 2
    scene.see_for(3600, Load(first_token_seconds=0.1, tokens_per_second=500.0))
    assert scene.islands == 1


def test_days_follow_each_other() -> None:
    scene = Simulation(noise=0.1)
    scene.run(2 * 86400, lambda now: 2500.0 * (1 - math.cos(now / 86400 * 2 * math.pi)))
    assert max(islands for _, islands in scene.changes) >= 5
    assert min(islands for _, islands in scene.changes) == 1
    assert len(scene.changes) <= 2 * 2 * 8
    assert scene.backlog < CAPACITY


SECONDS = st.none() | st.just(math.inf) | st.floats(0, 100)
LOADS = st.builds(Load, st.floats(0, 100) | st.just(math.inf), SECONDS, SECONDS, st.floats(0, 1e6))


@given(
    st.lists(st.tuples(LOADS, st.integers(1, 200)), max_size=60),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
)
def test_no_load_gets_it_out_of_its_bounds(steps: list[tuple[Load, int]], least: int, more: int, by_hand: bool) -> None:
    most = least + more
    scene = Scene(least, min_islands=least, max_islands=most, up_after_seconds=3.0, down_after_seconds=5.0)
    for number, (load, seconds) in enumerate(steps):
        if by_hand and number % 7 == 3:
            scene.islands = 1 + number % most
            scene.policy.changed()
        before = scene.islands
        scene.now += seconds
        assert scene.see(load) == before or least <= scene.islands <= most
    assert all(least <= islands <= most for _, islands in scene.changes)
