"""The reference of StepTokens: plain torch, on a CPU."""

import torch
from torch import Tensor

from tandem.workers.kernels.base import RowDraws
from tandem.workers.kernels.torch.sampling import draw
from tandem.workers.sampling.posted_samples import half_of
from tandem.workers.sampling.sample_batch import GREEDY_BELOW


class TorchStepTokens:
    """See StepTokens."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        return torch.where(sources < 0, tokens, last[sources])  # at -1 is some number

    def keep(self, logits: Tensor, draws: RowDraws, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        rows = logits.shape[0]
        last[:rows] = logits.argmax(-1)
        (drawn,) = (draws.temperature[:rows].float() >= GREEDY_BELOW).nonzero(as_tuple=True)
        if drawn.shape[0]:
            columns = (draws.draws, draws.temperature, draws.top_p, draws.min_p, draws.top_k)
            last[drawn] = draw(logits, drawn, *(column[drawn] for column in columns))
        (posted,) = tickets[:rows].nonzero(as_tuple=True)
        words[half_of(tickets[posted]), posted] = tickets[posted] | last[posted]
