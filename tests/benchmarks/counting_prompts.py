"""Prompts for a model that says t + 1 behind token t: they decide what prompt lookup drafts, and how much of it holds.

Such a model is any with random weights whose embedding of t is its head's row of t + 1, times SCALE.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CONTEXT = 1024
MOST_DRAFTED = 3  # tokens
OUTPUT = 120  # tokens of each row: fewer than have a draft
SCALE = 5000.0  # beside which what the layers add is small
FIRST_TOKEN, TOKENS_A_ROW, FIRST_WRONG = 1000, 1000, 100_000


def prompt_of(row: int, holds: float, most: int, draws: np.random.Generator) -> NDArray[np.int64]:
    """CONTEXT tokens in which each token that the row will put out stands with a draft behind it.

    The drafts of later tokens come first. So the first place of a token is where its own draft is.
    """
    first, width = FIRST_TOKEN + row * TOKENS_A_ROW, most + 1
    starts = first + np.arange(CONTEXT // width)[::-1]
    tokens = starts[:, None] + np.arange(width)
    right = np.cumprod(draws.random((starts.size, most)) < holds, axis=1).astype(bool)
    wrong = draws.integers(FIRST_WRONG, FIRST_WRONG + 10_000, right.shape)
    tokens[:, 1:] = np.where(right, tokens[:, 1:], wrong)
    return np.concatenate((np.full(CONTEXT - tokens.size, FIRST_WRONG), tokens.ravel()))


def prompts_of(rows: int, holds: float, most: int) -> list[NDArray[np.int64]]:
    """The same each time. holds: the probability of a drafted token to be the target's."""
    draws = np.random.default_rng(rows)
    return [prompt_of(row, holds, most, draws) for row in range(rows)]


def check_counts(row_tokens: Sequence[int]) -> None:
    """AssertionError unless each token is the one behind that before it."""
    steps = np.diff(np.array(row_tokens))
    assert (steps == 1).all(), f"{row_tokens[int(np.argmax(steps != 1)) :][:2]} follow one another"
