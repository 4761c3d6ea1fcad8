"""A device that takes as long as a formula gives, and rows with chunks next to them, in simulated time."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.workers.scheduling.step_time import StepLoad
from tandem.workers.scheduling.token_pace import TokenPace

Device = Callable[[StepLoad], float]
PROMPT = 2000  # tokens of each prompt


def linear(
    forward: float = 0.004, token: float = 2e-5, position: float = 3e-8, pair: float = 1.2e-9, knee: int = 0
) -> Device:
    """A device that takes a constant time for each forward until its tokens beyond `knee` take longer, and time to read
    KV."""

    def seconds(load: StepLoad) -> float:
        forwards = ((load.rows + load.joint, 1), (load.apart, load.forwards))
        products = sum(count * forward + token * max(0, tokens - count * knee) for tokens, count in forwards if tokens)
        return products + position * load.positions + pair * load.pairs

    return seconds


class Steps(NamedTuple):
    """seconds: float64 [n]. chunks: int64 [n], prompt tokens."""

    seconds: NDArray[np.float64]
    chunks: NDArray[np.int64]


def run(
    pace: TokenPace,
    device: Device,
    steps: int,
    *,
    rows: Callable[[int], int] = lambda step: 64,
    drafted: int = 0,
    context: int = 1200,
    noise: float = 0.02,
    pauses: float = 0.0,
    busy: float = 1.0,
    seed: int = 0,
) -> Steps:
    """rows: of each step. drafted: tokens that each verifies for a row, unless one forward has rows and chunk. context:
    positions of each row. noise: of the logarithm of a step's seconds. pauses: share of
    steps whose tokens the host reads 50 ms late, and those of the next at once. busy: share of steps with a chunk."""
    random = np.random.default_rng(seed)
    seconds, chunks, computed, late = np.zeros(steps), np.zeros(steps, np.int64), 0, 0.0
    for step in range(steps):
        count = rows(step)
        load = StepLoad()
        if random.random() < busy:
            tokens = pace.chunk_tokens(count, context * count, computed, drafted * count)
            load = pace.forward_load(tokens, computed, joint=pace.is_joint(count, tokens))
            computed = computed + tokens if computed + tokens < PROMPT else 0
        load = pace.step_load(count if load.joint else count * (1 + drafted), context * count, load)
        seconds[step] = device(load) * random.lognormal(0, noise) if late <= 0 else 1e-5
        late = 0.05 if random.random() < pauses else 0.0
        seconds[step] += late
        chunks[step] = load.chunk
        pace.measured(seconds[step], load)
    return Steps(seconds, chunks)
