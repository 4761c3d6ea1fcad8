"""The reference of DraftKernels: plain torch, on a CPU."""

import numpy as np
import torch
from torch import Tensor

from tandem.workers.kernels.base import FOLLOWS, FollowingRows, Histories
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

    def put(self, sources: Tensor, drafted: Tensor, number: int, histories: Histories) -> None:
        for source, token in zip(sources.tolist(), drafted.tolist(), strict=False):
            sequence = FOLLOWS - source
            if sequence >= 0 and histories.lengths[sequence] + number < histories.tokens.shape[1]:
                histories.tokens[sequence, histories.lengths[sequence] + number] = token


def _followed(history: Tensor, max_ngram: int) -> Tensor:
    """All that stands behind the first place of the longest n-gram that ends the history [n], as look_up() finds it."""
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
