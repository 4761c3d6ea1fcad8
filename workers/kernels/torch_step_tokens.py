"""The reference of StepTokens: plain torch, on a CPU."""

import torch
from torch import Tensor

from tandem.workers.posted_samples import half_of


class TorchStepTokens:
    """See StepTokens."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        return torch.where(sources < 0, tokens, last[sources])  # at -1 is some number

    def keep_best(self, logits: Tensor, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        last.copy_(logits.argmax(-1))
        (rows,) = tickets.nonzero(as_tuple=True)
        words[half_of(tickets[rows]), rows] = tickets[rows] | last[rows]
