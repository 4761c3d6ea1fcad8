"""Tests the policy of roles on scripted loads, and on those of simulated islands. Its clock is the test's."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tandem.cluster.config.scaling import ScalingSection
from tandem.cluster.scaling import Shape
from tandem.cluster.supervision.autoscaling.role_policy import RoleChange, RoleLoad, RolePolicy, pressures
from tandem.workers.config import Role
from tests.cluster.supervision.scaling_targets import SECONDS

TARGETS = SECONDS | {"max_workers": 8}
IDLE = RoleLoad()
GOOD = RoleLoad(first_token_seconds=0.2, token_seconds=0.02, prompt_tokens_per_second=100, output_tokens_per_second=100)
SLOW_PROMPTS = replace(GOOD, first_token_seconds=1.5, prefill_seconds=1.4, prefill_use=1.0, backlog=0.1)
NO_ROOM = replace(GOOD, queue_seconds=3.0, prefill_seconds=0.1, decode_use=1.0)
SLOW_TOKENS = replace(GOOD, token_seconds=0.15)


class Scene:
    """A policy and its time. shapes: as the policy has asked for, at once."""

    tick = 1.0  # seconds

    def __init__(self, *shapes: tuple[int, int], **settings: Any) -> None:
        self.now = 1000.0
        self.shapes = {f"c-{number}": Shape(*shape) for number, shape in enumerate(shapes)}
        self.section = ScalingSection(**{**TARGETS, **settings})
        self.policy = RolePolicy(self.section, lambda: self.now)
        self.changes: list[tuple[float, RoleChange]] = []

    def see(self, load: RoleLoad) -> None:
        self.now += self.tick
        change = self.policy.desired(load, self.shapes)
        if change is None:
            return
        assert change.why
        assert change.shape != self.shapes[change.island]
        self.changes.append((self.now, change))
        self.shapes[change.island] = change.shape
        self.policy.changed()

    def see_for(self, seconds: float, load: RoleLoad) -> list[tuple[int, int]]:
        for _ in range(int(seconds)):
            self.see(load)
        return [(shape.num_prefill, shape.num_decode) for shape in self.shapes.values()]


class Simulation(Scene):
    """One island. A request waits for room, then for its prompt, then is decoded for STAY seconds.

    prompts, outputs: that a worker does a second. A decode worker has room for as many requests as that needs.
    """

    tick = 5.0
    STAY = 10.0

    def __init__(self, shape: tuple[int, int], prompts: float, outputs: float, *, seed: int = 0) -> None:
        super().__init__(shape)
        self.prompts, self.outputs = prompts, outputs
        self.waiting = self.computed = self.decoded = 0.0  # requests that wait for room, for their prompt, for tokens
        self._draw = random.Random(seed)

    def run(self, seconds: float, rate: float, noise: float = 0.0) -> None:
        for _ in range(int(seconds / self.tick)):
            shape = self.shapes["c-0"]
            room = self.outputs * self.STAY * shape.num_decode
            self.waiting += rate * self._draw.uniform(1 - noise, 1 + noise) * self.tick
            placed = min(self.waiting, max(0.0, room - self.computed - self.decoded))
            self.waiting, self.computed = self.waiting - placed, self.computed + placed
            can = self.prompts * shape.num_prefill * self.tick
            done = min(self.computed, can)
            self.computed, self.decoded = self.computed - done, self.decoded + done
            ended = self.decoded * self.tick / self.STAY
            taken = self.computed + self.decoded
            queue = _seconds(self.waiting, placed / self.tick)
            prompt = _seconds(self.computed, done / self.tick)
            self.see(
                RoleLoad(
                    queue,
                    prompt,
                    min(80.0, queue + prompt + 0.05 / (1.01 - done / can)) if done else None,
                    0.02 + 0.03 * min(1.0, taken / room),
                    100 * done / self.tick,
                    100 * ended / self.tick,
                    done / can,
                    min(1.0, taken / room),
                    self.computed / taken if taken else 0.0,
                )
            )
            self.decoded -= ended

    @property
    def shape(self) -> Shape:
        return self.shapes["c-0"]


def _seconds(there: float, per_second: float) -> float:
    return there / per_second if there and per_second else math.inf if there else 0.0


@pytest.mark.parametrize(
    ("load", "shape", "named"),
    [
        (SLOW_PROMPTS, (2, 1), "first tokens take 1.5 s; scaling.first_token_seconds is 1"),
        (NO_ROOM, (1, 2), "first tokens take 3 s; scaling.first_token_seconds is 1"),
        (SLOW_TOKENS, (1, 2), "tokens take 0.15 s; scaling.token_seconds is 0.1"),
        (replace(NO_ROOM, prefill_seconds=2.0, prefill_use=1.0, backlog=0.3), (2, 1), "first tokens take 3 s"),
    ],
)
def test_the_role_that_a_target_is_missed_by_gets_a_worker_once_it_is_sure(
    load: RoleLoad, shape: tuple[int, int], named: str
) -> None:
    scene = Scene((1, 1), max_workers=3)
    assert scene.see_for(30, load) == [(1, 1)]
    assert scene.see_for(2, load) == [shape]
    assert named in scene.changes[0][1].why
    assert scene.changes[0][1].grows


def test_a_worker_that_is_not_needed_any_more_is_given_back() -> None:
    scene = Scene((1, 1))
    scene.see_for(35, SLOW_TOKENS)
    assert scene.see_for(900, GOOD) == [(1, 2)], "one could not do as much"
    assert scene.see_for(299, IDLE) == [(1, 2)]
    assert scene.see_for(5, IDLE) == [(1, 1)]
    assert not scene.changes[-1][1].grows
    assert scene.see_for(5000, IDLE) == [(1, 1)]


def test_without_room_the_other_role_gives_one_up_if_it_can() -> None:
    scene = Scene((4, 4))
    assert scene.see_for(35, replace(SLOW_TOKENS, prefill_use=0.5)) == [(3, 5)]
    scene = Scene((4, 4))
    assert scene.see_for(600, replace(SLOW_TOKENS, prefill_use=0.6)) == [(4, 4)], "three would be too full"
    scene = Scene((1, 7))
    assert scene.see_for(600, SLOW_TOKENS) == [(1, 7)]
    scene = Scene((4, 4))
    assert scene.see_for(600, replace(SLOW_TOKENS, first_token_seconds=0.9)) == [(4, 4)], "near its own target"


def test_workers_that_were_refused_come_from_the_other_role_for_a_while() -> None:
    scene = Scene((3, 1))
    scene.policy.refused()
    assert scene.see_for(40, SLOW_TOKENS) == [(2, 2)]
    scene = Scene((1, 1))
    scene.policy.refused()
    assert scene.see_for(299, SLOW_TOKENS) == [(1, 1)]
    assert scene.see_for(2, SLOW_TOKENS) == [(1, 2)]


def test_one_island_changes_at_a_time_and_all_stay_alike() -> None:
    scene = Scene((1, 1), (1, 1), (1, 1), max_workers=4)
    assert scene.see_for(45, SLOW_TOKENS).count((1, 2)) == 1
    assert scene.see_for(115, SLOW_TOKENS) == [(1, 2)] * 3
    assert scene.see_for(5000, SLOW_TOKENS) == [(1, 3)] * 3
    assert scene.see_for(20_000, IDLE) == [(1, 1)] * 3


def test_a_role_that_no_target_is_about_keeps_its_workers() -> None:
    scene = Scene((3, 1), queue_seconds=None, first_token_seconds=None)
    assert scene.see_for(100, SLOW_TOKENS)[0][0] == 3
    assert scene.see_for(9000, IDLE) == [(3, 1)]
    assert set(pressures(GOOD, {"token_seconds": 1.0}, [Shape(1, 1)])) == {Role.DECODE}


def test_an_order_by_hand_holds_until_the_policy_is_sure_again() -> None:
    scene = Scene((1, 1))
    scene.see_for(250, IDLE)
    scene.shapes["c-0"] = Shape(2, 2)
    scene.policy.changed()
    assert scene.see_for(299, IDLE) == [(2, 2)]
    scene.see_for(5, IDLE)
    assert scene.see_for(400, IDLE) == [(1, 1)]


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    begin=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    rate=st.floats(0.5, 12.0),
    prompts=st.floats(1.0, 6.0),
    outputs=st.floats(1.0, 6.0),
    noise=st.sampled_from([0.0, 0.15]),
    seed=st.integers(0, 99),
)
def test_a_constant_load_settles_and_then_nothing_changes(
    begin: tuple[int, int], rate: float, prompts: float, outputs: float, noise: float, seed: int
) -> None:
    scene = Simulation(begin, prompts, outputs, seed=seed)
    scene.run(3 * 3600, rate, noise)
    settled = scene.now
    scene.run(3 * 3600, rate, noise)
    shape = scene.shape
    late = [change for at, change in scene.changes if at > settled]
    assert len(late) <= (1 if noise else 0), "an edge that noise takes hours to cross is crossed once"
    assert len(scene.changes) <= 14
    assert shape.num_prefill + shape.num_decode <= 8
    enough = [math.ceil(rate / (0.75 * each)) for each in (prompts, outputs)]
    if sum(enough) <= 6:  # the largest load of it fits with ease
        assert scene.waiting + scene.computed <= rate * scene.tick * 1.3, "all that comes is served"
        assert shape.num_prefill <= enough[0] + 1
        assert shape.num_decode <= enough[1] + 1


def test_more_prompts_bring_prefill_workers_and_longer_outputs_decode_workers() -> None:
    scene = Simulation((2, 2), prompts=3.0, outputs=3.0)
    scene.prompts = 1.0  # they are longer now
    scene.run(3600, 2.6)
    assert scene.shape.num_prefill in (3, 4)
    scene.prompts, scene.outputs = 3.0, 0.7
    scene.run(7200, 2.6)
    assert scene.shape.num_decode >= 4
    scene.run(7200, 0.0)
    assert scene.shape == Shape(1, 1)


SECONDS = st.none() | st.just(math.inf) | st.floats(0, 100)
PARTS = st.floats(0, 1)
LOADS = st.builds(
    RoleLoad,
    st.floats(0, 100) | st.just(math.inf),
    st.floats(0, 100) | st.just(math.inf),
    SECONDS,
    SECONDS,
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    PARTS,
    PARTS,
    PARTS,
)


@given(
    st.lists(st.tuples(LOADS, st.integers(1, 200)), max_size=60),
    st.lists(st.tuples(st.integers(1, 3), st.integers(2, 3)), min_size=1, max_size=3),
    st.booleans(),
)
def test_no_load_gets_an_island_out_of_its_bounds(
    steps: list[tuple[RoleLoad, int]], shapes: list[tuple[int, int]], refused: bool
) -> None:
    scene = Scene(*shapes, max_workers=6, min_decode=2, up_after_seconds=3.0, down_after_seconds=5.0)
    for number, (load, seconds) in enumerate(steps):
        if refused and number % 5 == 2:
            scene.policy.refused()
        scene.now += seconds
        scene.see(load)
        for shape in scene.shapes.values():
            assert shape.num_prefill >= 1
            assert shape.num_decode >= 2
            assert shape.num_prefill + shape.num_decode <= 6
