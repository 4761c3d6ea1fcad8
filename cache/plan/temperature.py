"""Temperatures of attention that grow with a token's position, for contexts far longer than a model was trained on."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Temperature:
    """q at position p is multiplied by 1 + scale · log(1 + ⌊(p + 1) / floor⌋) (Llama 4; Nakanishi, 2025)."""

    floor: int
    scale: float

    def factors(self, positions: Tensor) -> Tensor:
        """float32 [T, 1, 1] of positions int64 [T], on their device."""
        steps = torch.floor((positions.float() + 1.0) / self.floor)
        return (torch.log1p(steps) * self.scale + 1.0)[:, None, None]
