"""The reference of DeltaKernels: plain torch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchDelta:
    """See DeltaKernels."""

    def rates(self, b: Tensor, a: Tensor, decay: Tensor, decay_bias: Tensor) -> tuple[Tensor, Tensor]:
        return decay * F.softplus(a.flatten(1).float() + decay_bias), b.flatten(1).sigmoid().float()

    def gate(self, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact, gates = o.float(), z.reshape(o.shape).float()
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
        return (weight * normed.to(o.dtype) * F.silu(gates)).to(o.dtype).flatten(1)
