"""How long chunks beside decode rows become, whatever device answers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.runner.batch_buckets import GraphSizes
from tandem.workers.scheduling.batch import Chunk
from tandem.workers.scheduling.step_time import NOTHING, StepLoad
from tandem.workers.scheduling.token_pace import LEAST_CHUNK, TokenPace
from tests.support.simulated_device import Device, Steps, linear, run
from tests.workers.scheduling.test_scheduler import prompt

MOST = 8192
BOUND = 0.015
SHARE = 0.9
SIZES = GraphSizes(rows=(16, 64, 128), chunks=(64, 96, 128, 192, 256, 384, 512), prompts=(64, 128, 256, 512, 1024))
SETTLED = 1000  # steps


def waves(step: int) -> int:
    return int(50 + 40 * np.sin(step / 300))


def settled(steps: Steps) -> Steps:
    """Returns the steps with chunks, once the model knows the device."""
    with_chunks = steps.chunks > 0
    with_chunks[:SETTLED] = False
    return Steps(steps.seconds[with_chunks], steps.chunks[with_chunks])


DEVICES = {
    "linear": linear(),
    "hinge": linear(forward=0.005, knee=200),
    "slow at prompts": linear(token=4e-5),
    "without constant": linear(forward=1e-4),
}


LOADS = {
    "like rows": {},
    "unlike rows": {"rows": waves},
    "seldom prompts": {"rows": waves, "busy": 0.4},
    "pauses": {"pauses": 0.005},
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_the_share_of_steps_that_was_asked_for_keeps_the_bound_and_uses_it(device: Device, load: dict) -> None:
    seconds, _ = settled(run(TokenPace(BOUND, MOST, SHARE), device, 4000, **load))
    assert SHARE - 0.03 < (seconds <= BOUND).mean() < SHARE + 0.03
    assert np.median(seconds) > 0.95 * BOUND


@pytest.mark.parametrize("share", [0.6, 0.8, 0.97])
def test_the_share_is_the_operators(share: float) -> None:
    seconds, _ = settled(run(TokenPace(BOUND, MOST, share), linear(), 4000, rows=waves, noise=0.05))
    assert share - 0.03 < (seconds <= BOUND).mean() < share + 0.03


def test_a_drifting_device_is_followed() -> None:
    device, slower = linear(), iter(1 + 0.25 * np.sin(np.arange(10_000) / 1500))
    seconds, _ = settled(run(TokenPace(BOUND, MOST, SHARE), lambda load: device(load) * next(slower), 10_000))
    assert SHARE - 0.06 < (seconds <= BOUND).mean() < SHARE + 0.06
    assert np.median(seconds) > 0.94 * BOUND


def test_equal_steps_make_it_forget_nothing() -> None:
    """No other rows come for a long time; then they do."""
    device, pace = linear(), TokenPace(BOUND, MOST, SHARE)
    run(pace, device, 1000, rows=waves)
    run(pace, device, 10_000, rows=lambda step: 40)
    for rows in (85, 8):
        seconds, chunks = run(pace, device, 60, rows=lambda step, rows=rows: rows)
        assert np.median(seconds[:10]) < 1.02 * BOUND
        assert (seconds < 1.1 * BOUND).all()
        assert np.median(seconds) > 0.93 * BOUND
        assert chunks.std() < 0.1 * chunks.mean()


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_first_steps_keep_the_bound(device: Device) -> None:
    seconds, _ = run(TokenPace(BOUND, MOST, SHARE), device, 40)
    assert (seconds <= BOUND).mean() >= 0.9
    assert (seconds < 1.25 * BOUND).all()


def test_chunks_are_the_largest_graph_that_fits() -> None:
    pace, device = TokenPace(BOUND, MOST, SHARE, SIZES), linear()
    seconds, chunks = settled(run(pace, device, 2000, noise=0.0))
    assert set(chunks.tolist()) <= set(SIZES.chunks)
    assert (seconds <= BOUND).mean() > 0.97
    for computed in (0, 1000):
        chunk = pace.chunk_tokens(64, 64 * 1200, computed)
        larger = SIZES.chunks[SIZES.chunks.index(chunk) + 1]
        load = pace.step_load(64, 64 * 1200, pace.forward_load(larger, computed, joint=True))
        assert device(load) > 0.98 * BOUND


def test_padding_counts() -> None:
    pace = TokenPace(BOUND, MOST, SHARE, SIZES)
    chunks = [Chunk(prompt(1, 900), 50), Chunk(prompt(2, 900), 30)]
    joint = pace.step_load(17, 1000, pace.chunks_load(chunks, joint=True))
    assert joint == StepLoad(rows=64, positions=1000, joint=96, pairs=50 * 51 // 2 + 30 * 31 // 2)
    apart = pace.step_load(17, 1000, pace.chunks_load(chunks, joint=False))
    assert apart == StepLoad(rows=17, positions=1000, forwards=1, apart=128, pairs=joint.pairs)
    assert pace.step_load(17, 1000, pace.chunks_load((), joint=True)) == StepLoad(rows=17, positions=1000)


@pytest.mark.parametrize("sizes", [GraphSizes(joint=False, prompts=SIZES.prompts), GraphSizes(joint=False)])
def test_a_chunk_of_its_own_forward_pays_for_the_weights(sizes: GraphSizes) -> None:
    seconds, chunks = settled(run(TokenPace(BOUND, MOST, SHARE, sizes), linear(knee=100), 2000))
    _, together = settled(run(TokenPace(BOUND, MOST, SHARE), linear(knee=100), 2000))
    assert (seconds <= BOUND).mean() > SHARE - 0.03
    assert chunks.mean() < together.mean()


@pytest.mark.parametrize("sizes", [GraphSizes(joint=False, prompts=SIZES.prompts), GraphSizes(joint=False)])
def test_a_chunk_beside_a_step_with_drafts_is_shorter(sizes: GraphSizes) -> None:
    seconds, chunks = settled(run(TokenPace(BOUND, MOST, SHARE, sizes), linear(0.001), 2000, drafted=3))
    _, undrafted = settled(run(TokenPace(BOUND, MOST, SHARE, sizes), linear(0.001), 2000))
    assert (seconds <= BOUND).mean() > SHARE - 0.03
    assert chunks.mean() < undrafted.mean()


def test_a_fast_device_has_chunks_beyond_the_joint_graphs() -> None:
    """Its prompts are forwards of their own then."""
    seconds, chunks = settled(run(TokenPace(BOUND, MOST, SHARE, SIZES), linear(0.001, 3e-6, 2e-9), 2000))
    assert (seconds <= BOUND).mean() > SHARE - 0.03
    assert chunks.min() > SIZES.prompts[-1]
    assert np.median(seconds) > 0.95 * BOUND


def test_rows_that_take_too_long_by_themselves_leave_the_least_chunk() -> None:
    _, chunks = run(TokenPace(BOUND, MOST, SHARE), linear(forward=0.05), 100)
    assert set(chunks[8:].tolist()) == {LEAST_CHUNK}


def test_one_slow_step_changes_little() -> None:
    pace = TokenPace(BOUND, MOST, SHARE)
    run(pace, linear(), 1000)
    before = pace.chunk_tokens(64, 64 * 1200)
    pace.measured(0.5, pace.step_load(64, 64 * 1200, pace.forward_load(before, joint=True)))
    run(pace, linear(), 40)
    assert pace.chunk_tokens(64, 64 * 1200) == pytest.approx(before, rel=0.05)


def test_without_a_bound_chunks_are_whole() -> None:
    pace = TokenPace(None, MOST)
    pace.measured(3.0, StepLoad(rows=3, joint=100))
    assert pace.chunk_tokens(3, 100) == MOST


@given(most=st.integers(1, 2000), rows=st.integers(1, 300), context=st.integers(0, 10**6), joint=st.booleans())
@settings(max_examples=50)
def test_no_chunk_is_longer_than_a_batch(most: int, rows: int, context: int, joint: bool) -> None:
    for sizes in (SIZES._replace(joint=joint), GraphSizes(joint)):
        pace = TokenPace(BOUND, most, SHARE, sizes)
        assert min(LEAST_CHUNK, most) <= pace.chunk_tokens(rows, 100 * rows, context) <= most
        pace.measured(0.001, pace.step_load(rows, 100, pace.forward_load(most, joint=joint)))
        assert min(LEAST_CHUNK, most) <= pace.chunk_tokens(rows, 100 * rows, context) <= most


def test_what_prompts_take_is_known_beside_rows_and_alone() -> None:
    pace, device = TokenPace(BOUND, 2048, SHARE), linear()
    assert pace.prompt_rate(64, 64 * 1200) == 0
    seconds, chunks = settled(run(pace, device, 2000))
    assert pace.prompt_rate(64, 64 * 1200) == pytest.approx(chunks.mean() / seconds.mean(), rel=0.1)
    assert pace.prompt_rate() == pytest.approx(
        2048 / device(StepLoad(forwards=1, apart=2048, pairs=2048**2 // 2)), rel=0.1
    )
    assert pace.prompt_seconds(2048, 64, 64 * 1200) > 1.5 * pace.prompt_seconds(2048)
    assert pace.prompt_seconds(2 * 2048) > 1.9 * pace.prompt_seconds(2048)


def test_prompts_have_a_rate_where_the_model_says_that_their_tokens_cost_nothing() -> None:
    """The rows' reads decide how long a step takes. After pauses of the host the next step seems to take no time."""
    pace, random = TokenPace(BOUND, 64, SHARE), np.random.default_rng(0)
    costs_nothing = False
    for step in range(200):
        rows = int(random.integers(1, 9))
        positions = rows * int(random.integers(100, 3000))
        chunk = pace.forward_load(64, joint=False) if random.random() < 0.5 or not step else NOTHING
        seconds = 1e-6 if random.random() < 0.3 else 1e-6 * positions * random.uniform(0.9, 1.1)
        pace.measured(seconds, pace.step_load(rows, positions, chunk))
        costs_nothing = costs_nothing or not pace.prompt_seconds(64)
        assert 0 < pace.prompt_rate() < np.inf
    assert costs_nothing
