"""The reference of FusedGemms: plain torch, on any device."""

import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import Linear, RmsNorm


class TorchFusedGemms:
    """See FusedGemms."""

    def linear(self, x: Tensor, weights: Linear, norm: RmsNorm | None = None) -> Tensor:
        row, bias = x.float(), weights.bias
        if norm is not None:
            row = F.rms_norm(row, row.shape[-1:], norm.weight.float(), norm.eps)
        return F.linear(row, weights.weight.float(), None if bias is None else bias.float()).to(x.dtype)

    def linear_silu_mul(self, x: Tensor, weights: Linear, norm: RmsNorm) -> Tensor:
        gate, up = self.linear(x, weights, norm).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def add_linear(self, residual: Tensor, x: Tensor, weights: Linear) -> None:
        residual.add_(self.linear(x, weights))
