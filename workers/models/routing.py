"""Which experts a token goes to."""

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """weights float32 and experts int64, [T, top_k] each, of router logits [T, E]; the heaviest first.

    weights: the softmax over all experts, in float32; normalize: divided by the sum of the chosen.
    """
    weights, experts = torch.softmax(logits, -1, dtype=torch.float32).topk(top_k, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts
