"""The reference of Sampler: plain torch, on a CPU."""

import numpy as np
import torch
from torch import Tensor

from tandem.workers.kernels.base import SamplingInputs
from tandem.workers.sampling.posted_samples import NOT_FINITE, half_of
from tandem.workers.sampling.sample_batch import GREEDY_BELOW


class TorchSampler:
    """See Sampler."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        sampled = last[sources]  # at -1 is some number
        return torch.where(sources < 0, tokens, sampled.masked_fill(sampled == NOT_FINITE, 0))

    def sample(self, logits: Tensor, sampling: SamplingInputs, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        rows = logits.shape[0]
        best = logits.argmax(-1, keepdim=True)  # NaN is better than any number
        last[:rows] = best.squeeze(-1)
        (sampled,) = (sampling.parameters["temperature"][:rows].float() >= GREEDY_BELOW).nonzero(as_tuple=True)
        if sampled.shape[0]:
            parameters = {name: _rounded(column[sampled, None]) for name, column in sampling.parameters.items()}
            weights = _filtered(logits[sampled].float(), **parameters)
            last[sampled] = _invert(weights, sampling.uniforms[sampled, None])
        last[:rows].masked_fill_(~logits.gather(-1, best).isfinite().squeeze(-1), NOT_FINITE)
        (posted,) = tickets[:rows].nonzero(as_tuple=True)
        words[half_of(tickets[posted]), posted] = tickets[posted] | last[posted]


def _rounded(column: Tensor) -> Tensor:
    return column.float() if column.is_floating_point() else column


def _filtered(logits: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor, top_k: Tensor) -> Tensor:
    """Probabilities float32 [m, vocab], 0 below the threshold that each filter sets; rows need not sum to 1. logits:
    float32 [m, vocab]. Others: [m, 1], all parameters of a row.

    Equals of a kept token are all kept. A filter that a row does not use changes nothing in it, so a sample does
    not depend on what else is in the batch.
    """
    scaled = logits / temperature
    probabilities = scaled.softmax(dim=-1)
    if (min_p > 0).any():
        best = probabilities.amax(dim=-1, keepdim=True)
        probabilities.mul_(probabilities >= min_p * best)
    if (top_k > 0).any():
        probabilities.mul_(scaled >= _top_k_threshold(scaled, top_k.clamp(0, scaled.shape[-1])))
    if (top_p < 1).any():
        probabilities.mul_(probabilities >= _top_p_threshold(probabilities, top_p))
    return probabilities


def _top_k_threshold(scaled: Tensor, top_k: Tensor) -> Tensor:
    """The k-th best value of each row, [m, 1]; -inf where top_k is 0."""
    best = scaled.topk(int(top_k.max()), dim=-1).values
    return best.gather(1, (top_k - 1).clamp_(min=0)).masked_fill_(top_k == 0, -torch.inf)


def _top_p_threshold(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """The least probability, [m, 1], of the fewest best tokens that together reach top_p of their row's sum."""
    ascending = _sort(probabilities)
    sums = ascending.cumsum(dim=-1, dtype=torch.float64)
    dropped = torch.searchsorted(sums, (1 - top_p.double()) * sums[:, -1:], right=True)
    return ascending.gather(1, dropped.clamp_(max=ascending.shape[-1] - 1))


def _sort(values: Tensor) -> Tensor:
    """Rows in ascending order, by numpy, which sorts 32 rows of 2048 six times as fast as torch."""
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index at which the running sum of a row exceeds uniforms · total, [m]. Where all are finite, weight 0
    is never sampled.

    In the order of token ids, not of probability: rounding that swaps near-equals then changes no sample.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    index = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    # uniforms · total may round up to the total itself: then the last index that carries weight
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    # Of a row that is not finite both are after its end.
    return torch.minimum(index, last).clamp_(max=weights.shape[-1] - 1).squeeze(1)
