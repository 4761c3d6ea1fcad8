"""How long chunks beside decode rows become, whatever device answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.scheduling.token_pace import LEAST_CHUNK, TokenPace

MOST = 8192


def settle(pace: TokenPace, step: float, fixed: float, per_token: float, steps: int = 60) -> float:
    """A device whose chunks take fixed + per_token · n; what the last step took."""
    seconds = step
    for _ in range(steps):
        tokens = pace.chunk_tokens
        seconds = step + fixed + per_token * tokens
        pace.measured(seconds, tokens)
    return seconds


@given(step=st.floats(0.001, 0.01), fixed=st.floats(0, 0.003), rate=st.floats(20_000, 200_000), alone=st.booleans())
def test_a_step_comes_to_take_what_it_may(step: float, fixed: float, rate: float, alone: bool) -> None:
    pace = TokenPace(0.015, MOST)
    if alone:  # else it never sees a step without a chunk
        pace.measured(step, 0)
    seconds = settle(pace, step, fixed, 1 / rate)
    assert seconds == pytest.approx(0.015, rel=0.02) or pace.chunk_tokens in (LEAST_CHUNK, MOST)
    assert seconds <= 0.0151 or pace.chunk_tokens == LEAST_CHUNK


def test_rows_that_take_too_long_by_themselves_leave_the_least_chunk() -> None:
    pace = TokenPace(0.015, MOST)
    pace.measured(0.05, 0)
    settle(pace, 0.05, 0.0, 1e-5)
    assert pace.chunk_tokens == LEAST_CHUNK


def test_one_slow_step_is_forgotten() -> None:
    pace = TokenPace(0.015, MOST)
    pace.measured(0.004, 0)
    settle(pace, 0.004, 0.0, 1e-5)
    before = pace.chunk_tokens
    pace.measured(0.5, before)
    assert LEAST_CHUNK <= pace.chunk_tokens < before
    settle(pace, 0.004, 0.0, 1e-5)
    assert pace.chunk_tokens == pytest.approx(before, rel=0.02)


def test_short_prompts_do_not_shorten_the_chunks_of_long_ones() -> None:
    pace = TokenPace(0.015, MOST)
    pace.measured(0.004, 0)
    settle(pace, 0.004, 0.002, 1e-5)
    before = pace.chunk_tokens
    for _ in range(50):
        pace.measured(0.0061, 10)  # nearly all of it is what any forward takes
    assert pace.chunk_tokens == before


def test_without_a_bound_chunks_are_whole() -> None:
    pace = TokenPace(None, MOST)
    pace.measured(3.0, 100)
    pace.measured(1.0, 0)
    assert (pace.chunk_tokens, pace.step_seconds) == (MOST, 1.0)


def test_no_chunk_is_longer_than_a_batch() -> None:
    assert TokenPace(0.015, 16).chunk_tokens == 16
