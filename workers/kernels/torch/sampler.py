"""The reference of Sampler: plain torch, on a CPU."""

import torch
from torch import Tensor

from tandem.workers.kernels.base import SamplingInputs
from tandem.workers.kernels.torch.sampling import sample
from tandem.workers.sampling.posted_samples import half_of
from tandem.workers.sampling.sample_batch import GREEDY_BELOW


class TorchSampler:
    """See Sampler."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        return torch.where(sources < 0, tokens, last[sources])  # at -1 is some number

    def sample(self, logits: Tensor, sampling: SamplingInputs, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        rows = logits.shape[0]
        last[:rows] = logits.argmax(-1)
        (sampled,) = (sampling.temperature[:rows].float() >= GREEDY_BELOW).nonzero(as_tuple=True)
        if sampled.shape[0]:
            last[sampled] = sample(
                logits,
                sampled,
                uniforms=sampling.uniforms[sampled],
                temperature=sampling.temperature[sampled],
                top_p=sampling.top_p[sampled],
                min_p=sampling.min_p[sampled],
                top_k=sampling.top_k[sampled],
            )
        (posted,) = tickets[:rows].nonzero(as_tuple=True)
        words[half_of(tickets[posted]), posted] = tickets[posted] | last[posted]
