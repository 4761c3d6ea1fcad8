"""Pools what is read of prompts that nobody decodes: hidden states, or logits of a few tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.workers.sampling.pending_samples import to_host
from tandem.workers.sampling.prompt_logprobs import SLICE_BYTES

Float32Array = NDArray[np.float32]


class Reading(NamedTuple):
    """The part of a chunk to read: the sum of the hidden states of its rows begin … end - 1, as the model's head gets
    them. With token_ids, the logits of these tokens after that one row instead."""

    begin: int
    end: int
    token_ids: tuple[int, ...] = ()


class Pooled(NamedTuple):
    """The values that one forward gave. It is there once the device is past what was launched before."""

    hidden: Float32Array  # [n, hidden], of readings without token_ids, in their order
    logits: Float32Array  # [m, k], of the others; k is the most token_ids, and rows with fewer end in any numbers


def pool(hidden: Tensor, readings: Sequence[Reading], logits_of: Callable[[Tensor], Tensor], vocab_size: int) -> Pooled:
    """Pools hidden states. hidden: [rows, hidden_size], one reading's rows after another's. Sums are in float32, in
    the order of rows. logits_of: see DenseDecoder.logits."""
    parts = hidden.split([one.end - one.begin for one in readings]) if readings else ()
    summed = [part for part, one in zip(parts, readings, strict=True) if not one.token_ids]
    judged = [part for part, one in zip(parts, readings, strict=True) if one.token_ids]
    if len(summed) == hidden.shape[0]:  # of one row each
        sums = hidden.float()
    else:
        rows = [part.sum(0, dtype=torch.float32) for part in summed]
        sums = torch.stack(rows) if rows else hidden.new_empty((0, hidden.shape[1]), dtype=torch.float32)
    logits = _logits(judged, [one.token_ids for one in readings if one.token_ids], logits_of, vocab_size)
    return Pooled(to_host(sums).numpy(), np.zeros((0, 0), np.float32) if logits is None else to_host(logits).numpy())


def _logits(
    rows: Sequence[Tensor],
    token_ids: Sequence[tuple[int, ...]],
    logits_of: Callable[[Tensor], Tensor],
    vocab_size: int,
) -> Tensor | None:
    """Computes logits slice by slice, as logprobs_of_targets() does."""
    if not rows:
        return None
    width, stride = max(map(len, token_ids)), max(1, SLICE_BYTES // (4 * vocab_size))
    padded = [[*ids, *[0] * (width - len(ids))] for ids in token_ids]
    wanted, stacked = torch.tensor(padded).to(rows[0].device), torch.cat(list(rows))
    parts = [
        logits_of(stacked[begin : begin + stride]).float().gather(1, wanted[begin : begin + stride])
        for begin in range(0, len(rows), stride)
    ]
    return torch.cat(parts)
