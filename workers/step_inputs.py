"""What a captured step is told of its rows, beside their places in the cache."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.cache.window import Int64Array
from tandem.workers.kernels.base import RowDraws
from tandem.workers.sample_batch import GREEDY_BELOW, SampleBatch
from tandem.workers.sampling import uniform

NUM_INPUTS = 8
ON_HOST = -1  # the source of a token that no step draws


def pack_inputs(
    tokens: Int64Array, sources: Int64Array, ticket: int, sampling: SampleBatch, positions: Int64Array
) -> list[Int64Array]:
    """NUM_INPUTS arrays int64 [n], of floats their bits; see ModelRunner.step and PostBox."""
    inputs = [tokens, sources, np.full(tokens.size, ticket)]
    if (sampling.temperature < GREEDY_BELOW).all():
        return inputs + [np.zeros(tokens.size, np.int64)] * 5
    floats = (uniform(sampling.seed, positions), sampling.temperature, sampling.top_p, sampling.min_p)
    return [*inputs, *(array.astype(np.float64).view(np.int64) for array in floats), sampling.top_k]


def unpack_inputs(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, RowDraws]:
    """Tokens, sources, tickets and draws of what pack_inputs() gave, in tensors int64 [n] each."""
    tokens, sources, tickets, *floats, top_k = inputs
    draws, temperature, top_p, min_p = (tensor.view(torch.float64) for tensor in floats)
    return tokens, sources, tickets, RowDraws(draws, temperature, top_p, min_p, top_k)
