"""How long chunks beside decode rows become, whatever device answers."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.scheduling.token_pace import LEAST_CHUNK, MARGIN, TokenPace

MOST = 8192
BOUND = 0.015


def settle(pace: TokenPace, step: float, per_token: float, steps: int = 80) -> float:
    """A device whose rows take `step`; what the last step took."""
    seconds = step
    for _ in range(steps):
        tokens = pace.chunk_tokens
        seconds = step + per_token * tokens
        pace.measured(seconds, tokens)
    return seconds


@given(step=st.floats(0.001, 0.02), rate=st.floats(5_000, 500_000))
def test_chunks_become_the_longest_that_fit(step: float, rate: float) -> None:
    pace = TokenPace(BOUND, MOST)
    pace.prompt_rate = rate
    seconds = settle(pace, step, 1 / rate)
    tokens = pace.chunk_tokens
    assert tokens == 1 << tokens.bit_length() - 1
    assert seconds <= BOUND or tokens == LEAST_CHUNK
    assert step + 2 * tokens / rate > 0.99 * MARGIN * BOUND or tokens == MOST


@given(step=st.floats(0.001, 0.01), rate=st.floats(5_000, 500_000), off=st.floats(0.7, 1.5))
def test_a_rate_that_is_somewhat_off_breaks_no_bound_by_much(step: float, rate: float, off: float) -> None:
    pace = TokenPace(BOUND, MOST)
    pace.prompt_rate = rate * off
    settle(pace, step, 1 / rate)
    times = [settle(pace, step, 1 / rate, 1) for _ in range(50)]
    assert sum(times) / len(times) <= 1.2 * BOUND or pace.chunk_tokens == LEAST_CHUNK


def test_rows_that_take_too_long_by_themselves_leave_the_least_chunk() -> None:
    pace = TokenPace(BOUND, MOST)
    pace.measured(0.05, 0)
    settle(pace, 0.05, 1e-5)
    assert pace.chunk_tokens == LEAST_CHUNK


def test_the_first_chunk_is_short() -> None:
    assert TokenPace(BOUND, MOST).chunk_tokens == LEAST_CHUNK


def test_one_slow_step_is_forgotten() -> None:
    pace = TokenPace(BOUND, MOST)
    settle(pace, 0.004, 5e-5)
    before = pace.chunk_tokens
    pace.measured(0.5, before)
    assert pace.chunk_tokens == LEAST_CHUNK < before
    settle(pace, 0.004, 5e-5)
    assert pace.chunk_tokens == before


def test_without_a_bound_chunks_are_whole() -> None:
    pace = TokenPace(None, MOST)
    pace.measured(3.0, 100)
    pace.measured(1.0, 0)
    assert pace.chunk_tokens == MOST


def test_no_chunk_is_longer_than_a_batch() -> None:
    assert TokenPace(BOUND, 16).chunk_tokens == 16
