"""The arrays of a step's rows, beside those of the cache: tokens, their sources, tickets and sampling inputs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.kernels.base import SamplingInputs
from tandem.workers.sampling.random import uniform
from tandem.workers.sampling.sample_batch import GREEDY_BELOW, SampleBatch

NUM_SAMPLING = 6
NUM_INPUTS = 2 + NUM_SAMPLING
ON_HOST = -1  # the source of a token that no step samples


class StepInputs(NamedTuple):
    """The inputs of a step's rows: see ModelRunner.step. Arrays are int64 [n]."""

    tokens: Int64Array
    sources: Int64Array
    sampling: SampleBatch
    positions: Int64Array


def pack_inputs(
    tokens: Int64Array, sources: Int64Array, ticket: int, sampling: SampleBatch, positions: Int64Array | None
) -> list[Int64Array]:
    """NUM_INPUTS arrays int64 [n], of floats their bits; see ModelRunner.step and PostBox. With LogitRules the step
    itself posts nothing: its tokens are sampled behind it. positions None: see pack_sampling()."""
    if sampling.rules is not None:
        return [tokens, sources, *[np.zeros(tokens.size, np.int64)] * NUM_SAMPLING]
    return [tokens, sources, *pack_sampling(ticket, sampling, positions)]


def unpack_inputs(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, SamplingInputs]:
    """Tokens, sources, tickets and sampling inputs of what pack_inputs() gave, in tensors int64 [n] each."""
    tokens, sources, *rest = inputs
    return tokens, sources, *unpack_sampling(rest)


def pack_sampling(ticket: int, sampling: SampleBatch, positions: Int64Array | None) -> list[Int64Array]:
    """The last NUM_SAMPLING of these arrays. positions None: the device knows them, and draws the numbers; the seeds
    stand in their place."""
    size = sampling.seed.size
    tickets = np.full(size, ticket)
    if (sampling.temperature < GREEDY_BELOW).all():
        return [tickets] + [np.zeros(size, np.int64)] * (NUM_SAMPLING - 1)
    numbers = sampling.seed if positions is None else uniform(sampling.seed, positions)
    floats = (array.astype(np.float64) for array in (sampling.temperature, sampling.top_p, sampling.min_p))
    return [tickets, *(array.view(np.int64) for array in (numbers, *floats)), sampling.top_k]


def unpack_sampling(inputs: Iterable[Tensor]) -> tuple[Tensor, SamplingInputs]:
    """Tickets and sampling inputs of what pack_sampling() gave, in tensors int64 [n] each."""
    tickets, *floats, top_k = inputs
    uniforms, temperature, top_p, min_p = (tensor.view(torch.float64) for tensor in floats)
    return tickets, SamplingInputs(uniforms, temperature, top_p, min_p, top_k)
