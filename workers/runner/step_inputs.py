"""The arrays of a step's rows, in addition to the cache's: tokens, their sources, tickets and sampling inputs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int64Array
from tandem.workers.kernels.base import SamplingInputs
from tandem.workers.sampling.random import uniform
from tandem.workers.sampling.sample_batch import SampleBatch
from tandem.workers.sampling.sampling_params import ROW

NUM_SAMPLING = 2 + len(ROW)
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
    itself posts nothing: its tokens are sampled after it. positions None: see pack_sampling()."""
    if sampling.rules is not None:
        return [tokens, sources, *[np.zeros(tokens.size, np.int64)] * NUM_SAMPLING]
    return [tokens, sources, *pack_sampling(ticket, sampling, positions)]


def unpack_inputs(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, SamplingInputs]:
    """Tokens, sources, tickets and sampling inputs of what pack_inputs() gave, in tensors int64 [n] each."""
    tokens, sources, *rest = inputs
    return tokens, sources, *unpack_sampling(rest)


def pack_sampling(ticket: int, sampling: SampleBatch, positions: Int64Array | None) -> list[Int64Array]:
    """Returns the last NUM_SAMPLING of the arrays. positions None: the device knows them, and draws the numbers; the
    seeds stand in their place."""
    tickets = np.full(sampling.size, ticket)
    if sampling.is_greedy:
        return [tickets] + [np.zeros(sampling.size, np.int64)] * (NUM_SAMPLING - 1)
    numbers = sampling.seeds if positions is None else uniform(sampling.seeds, positions)
    return [tickets, numbers.view(np.int64), *sampling.columns]


def unpack_sampling(inputs: Iterable[Tensor]) -> tuple[Tensor, SamplingInputs]:
    """Tickets and sampling inputs of what pack_sampling() gave, in tensors int64 [n] each."""
    tickets, uniforms, *columns = inputs
    parameters = {
        name: column.view(torch.float64) if ROW[name] is np.float64 else column
        for name, column in zip(ROW, columns, strict=True)
    }
    return tickets, SamplingInputs(uniforms.view(torch.float64), parameters)
