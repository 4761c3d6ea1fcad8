"""The reference of StepTokens: plain torch, on any device."""

import torch
from torch import Tensor


class TorchStepTokens:
    """See StepTokens."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        return torch.where(sources < 0, tokens, last[sources])  # at -1 is some number

    def keep_best(self, logits: Tensor, last: Tensor) -> None:
        last.copy_(logits.argmax(-1))
