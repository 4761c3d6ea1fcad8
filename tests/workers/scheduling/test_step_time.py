"""The model of a step's seconds: what it learns, and what it does not lose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.scheduling.step_time import PRIOR, StepLoad, StepTime
from tests.support.simulated_device import linear

DEVICE = linear(forward=0.004, token=2e-5, position=3e-8, pair=1.2e-9)


def random_loads(count: int) -> list[StepLoad]:
    random = np.random.default_rng(1)
    loads = []
    for _ in range(count):
        rows, chunk, context = (int(random.integers(1, most)) for most in (130, 512, 8000))
        load = StepLoad(rows=rows, positions=rows * context, pairs=chunk * context)
        one = load._replace(joint=chunk) if random.random() < 0.5 else load._replace(forwards=1, apart=chunk)
        loads.append(one if random.random() < 0.8 else load._replace(pairs=0))
    return loads


def taught(time: StepTime, loads: list[StepLoad]) -> StepTime:
    for load in loads:
        time.measured(DEVICE(load), load)
        time.fit()
    return time


def test_it_learns_each_term() -> None:
    time, loads = taught(StepTime(0.9), random_loads(600)), random_loads(40)
    assert [time.seconds(load) for load in loads] == pytest.approx([DEVICE(load) for load in loads], rel=0.02)
    assert time.excess == pytest.approx(1, abs=0.02)


def test_steps_that_do_not_vary_leave_what_others_have_told() -> None:
    time, same = taught(StepTime(0.9), random_loads(600)), StepLoad(rows=50, positions=60_000, joint=200, pairs=20_000)
    taught(time, [same] * 10_000)
    assert time.seconds(same) == pytest.approx(DEVICE(same), rel=0.01)
    others = random_loads(40)
    assert [time.seconds(load) for load in others] == pytest.approx([DEVICE(load) for load in others], rel=0.2)


def test_equal_steps_alone_leave_the_rest_to_the_prior() -> None:
    same = StepLoad(rows=50, positions=60_000, joint=200, pairs=20_000)
    time = taught(StepTime(0.9), [same] * 10_000)
    assert time.seconds(same) == pytest.approx(DEVICE(same), rel=0.01)
    for load in random_loads(40):
        assert 0.2 * DEVICE(load) < time.seconds(load) < 5 * DEVICE(load)


def test_before_the_first_step_the_prior_holds() -> None:
    time = StepTime(0.9)
    assert time.seconds(StepLoad(rows=1)) == pytest.approx(PRIOR[0] + PRIOR[1])
    assert time.excess > 1


@given(seconds=st.lists(st.floats(0, 1e3), min_size=1, max_size=60), share=st.floats(0.51, 0.99))
def test_no_coefficient_is_below_zero_whatever_is_measured(seconds: list[float], share: float) -> None:
    time, loads = StepTime(share), random_loads(len(seconds))
    for each, load in zip(seconds, loads, strict=True):
        time.measured(each, load)
        time.fit()
    smaller = StepLoad(rows=1)
    for load in loads:
        assert 0 <= time.seconds(smaller) <= time.seconds(load) < 1e9
    assert time.excess > 0


def test_a_pause_of_the_host_in_fifty_steps_moves_neither_model_nor_excess() -> None:
    """Tokens of one step are read late, the next step's at once."""
    time = StepTime(0.9)
    for number, load in enumerate(random_loads(1000)):
        time.measured({40: 0.1, 41: 1e-6}.get(number % 50, DEVICE(load)), load)
        time.fit()
    loads = random_loads(40)
    assert [time.seconds(load) for load in loads] == pytest.approx([DEVICE(load) for load in loads], rel=0.1)
    assert time.excess < 1.1


@given(rows=st.integers(1, 512), chunk=st.integers(1, 4096), context=st.integers(0, 10_000), joint=st.booleans())
def test_a_search_among_sizes_sees_the_same_seconds(rows: int, chunk: int, context: int, joint: bool) -> None:
    time = StepTime(0.9)
    pairs = chunk * context + chunk * (chunk + 1) // 2
    load = StepLoad(rows, 70 * rows, chunk if joint else 0, 0 if joint else 1, 0 if joint else chunk, pairs)
    assert time.beside(rows, 70 * rows, context, joint=joint)(chunk) == pytest.approx(time.seconds(load))
