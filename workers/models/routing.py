"""Routing: the choice of experts for each token, and their weights."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.choice import choose_best_experts

TINY = 1e-20  # as in transformers: sigmoids may all be 0
SCORES = ("sqrtsoftplus", "sigmoid", "softmax")


@dataclass(frozen=True)
class GroupLimit:
    """Limits the choice to the best groups of neighbouring experts."""

    num_groups: int
    kept: int  # groups that can be chosen from
    counted: int  # best scores of a group, whose sum is the group's score

    def apply(self, scores: Tensor) -> Tensor:
        """Returns scores [T, E] with -inf in the groups that are out."""
        groups = scores.unflatten(1, (self.num_groups, -1))
        best = groups.topk(self.counted, -1).values.sum(-1).topk(self.kept, -1).indices
        out = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, False)
        return groups.masked_fill(out.unsqueeze(2), -torch.inf).flatten(1)


@dataclass(frozen=True)
class Routing:
    """A token goes to the experts with the best scores, in float32. Its weights are their scores times scale."""

    top_k: int
    normalize: bool  # weights are divided by their sum
    scores: str = "softmax"  # one of SCORES, of the experts' logits
    groups: GroupLimit | None = None  # that can be chosen from; None: all
    corrected: bool = False  # the choice, not the weights, adds a learned correction to the scores
    scale: float = 1.0
    scales_input: bool = False  # an expert takes x times its weight, and the outputs are added as they are

    @property
    def is_plain(self) -> bool:
        """Whether a token goes to the experts with the largest softmax, and nothing else counts."""
        return self.scores == "softmax" and self.groups is None and not self.corrected and not self.scales_input


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, experts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """weights float32 and experts int64, [T, top_k] each, of router logits [T, E]; correction: float32 [E]. experts:
    where they are chosen already, int64 [T, top_k]."""
    best = choose_best_experts(logits.device) if experts is None and routing.is_plain else None
    if best is not None:
        return best(logits, routing.top_k, normalize=routing.normalize, scale=routing.scale)
    scores = _score(logits, routing.scores)
    if experts is not None:
        return _weigh(scores.gather(1, experts), routing), experts
    ranks = scores if correction is None else scores + correction
    if routing.scales_input:
        ranks = logits.float()  # sigmoids of large ones are all 1
    if routing.groups is not None:
        ranks = routing.groups.apply(ranks)
    weights, experts = ranks.topk(routing.top_k, -1)
    if ranks is not scores:
        weights = scores.gather(1, experts)
    return _weigh(weights, routing), experts


def _score(logits: Tensor, scores: str) -> Tensor:
    """float32 [T, E]."""
    if scores == "softmax":
        return torch.softmax(logits, -1, dtype=torch.float32)
    return logits.float().sigmoid() if scores == "sigmoid" else F.softplus(logits.float()).sqrt()


def _weigh(weights: Tensor, routing: Routing) -> Tensor:
    if routing.normalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total if routing.scores == "softmax" else total + TINY)
    return weights if routing.scale == 1 else weights * routing.scale
