"""The reference of DraftKernels: plain torch, on a CPU."""

import numpy as np
import torch
from torch import Tensor

from tandem.workers.kernels.base import FOLLOWS, Entered, EnteringRows, FollowingRows, Histories
from tandem.workers.sampling.posted_samples import NOT_FINITE
from tandem.workers.sampling.random import uniform


class TorchDraftKernels:
    """See DraftKernels."""

    def accept(
        self, tokens: Tensor, sampled: Tensor, positions: Tensor, preceding: Tensor, histories: Histories
    ) -> None:
        num_sequences, capacity = histories.tokens.shape
        begins = (preceding == 0).nonzero().flatten().tolist()
        ends = [*begins[1:], tokens.shape[0]]
        for sequence, (begin, end) in enumerate(zip(begins[:num_sequences], ends, strict=False)):
            is_right = tokens[begin + 1 : end] == sampled[begin : end - 1]
            held = 1 + int(is_right.long().cumprod(0).sum())
            rows = torch.arange(begin, begin + held)
            rows = rows[positions[rows] + 1 < capacity]
            histories.tokens[sequence, positions[rows] + 1] = sampled[rows].int()
            histories.lengths[sequence] = positions[begin + held - 1] + 2
            histories.surplus[sequence] = end - begin - held

    def follow(self, rows: FollowingRows, histories: Histories, max_ngram: int) -> Tensor:
        tokens, sources, positions, uniforms, preceding = rows
        shift = torch.zeros_like(preceding)
        for source in sources[sources <= FOLLOWS].unique().tolist():
            sequence = FOLLOWS - source
            (which,) = (sources == source).nonzero(as_tuple=True)
            history, behind = histories.tokens[sequence].tensor_split([int(histories.lengths[sequence])])
            found = torch.cat((history[-1:], _followed(history, max_ngram) if max_ngram else behind)).long()
            found = torch.cat((found.masked_fill(found == NOT_FINITE, 0), torch.zeros(1, dtype=torch.int64)))
            tokens[which] = found[preceding[which].clamp(max=found.shape[0] - 1)]
            shift[which] = histories.surplus[sequence]
            sampled = (positions[which] - shift[which] + 1).numpy()
            drawn = uniform(uniforms[which].numpy().view(np.uint64), sampled)
            uniforms[which] = torch.from_numpy(drawn.view(np.int64))
        return shift

    def enter(self, rows: EnteringRows, number: int, ahead: int, histories: Histories) -> Entered:
        tokens, shift = torch.zeros_like(rows.sources), torch.zeros_like(rows.sources, dtype=torch.int32)
        uniforms, own = rows.seeds.clone(), number - ahead
        (which,) = (rows.sources <= FOLLOWS).nonzero(as_tuple=True)
        sequences, steps = FOLLOWS - rows.sources[which], rows.steps[which]
        capacity, surplus = histories.tokens.shape[1], histories.surplus[sequences]
        places = histories.lengths[sequences].clamp(max=capacity) - 1 + number
        found = histories.tokens[sequences, places.clamp(max=capacity - 1)]
        tokens[which] = found.masked_fill((places >= capacity) | (found == NOT_FINITE), 0).long()
        sampled = rows.positions[which] + number - surplus + 1
        drawn = uniform(rows.seeds[which].numpy().view(np.uint64), sampled.numpy())
        uniforms[which] = torch.from_numpy(drawn.view(np.int64))
        first = surplus + steps if own == 0 else surplus
        shift[which] = (first if own <= 0 else -(steps >= own).int()).int()
        return Entered(tokens, uniforms, shift)

    def put(self, sources: Tensor, drafted: Tensor, number: int, histories: Histories) -> None:
        for source, token in zip(sources.tolist(), drafted.tolist(), strict=False):
            sequence = FOLLOWS - source
            if sequence >= 0 and histories.lengths[sequence] + number < histories.tokens.shape[1]:
                histories.tokens[sequence, histories.lengths[sequence] + number] = token


def _followed(history: Tensor, max_ngram: int) -> Tensor:
    """All that stands after the first place of the longest n-gram that ends the history [n], as look_up() finds it."""
    last = history.shape[0] - 1
    if last < 1 or not (history[:last] == history[last]).any():
        return history[:0]
    ends = torch.arange(last)
    for back in range(max_ngram):
        longer = ends[ends >= back]
        longer = longer[history[longer - back] == history[last - back]]
        if longer.shape[0] == 0:
            break
        ends = longer
    return history[ends[0] + 1 :]
