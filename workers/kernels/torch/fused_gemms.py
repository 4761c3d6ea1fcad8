"""The reference of FusedGemms: plain torch, on any device."""

import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import RmsNorm


class TorchFusedGemms:
    """See FusedGemms."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RmsNorm | None = None) -> Tensor:
        row = x.float()
        if norm is not None:
            row = F.rms_norm(row, row.shape[-1:], norm.weight.float(), norm.eps)
        return F.linear(row, weight.float(), None if bias is None else bias.float()).to(x.dtype)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: RmsNorm) -> Tensor:
        gate, up = self.linear(x, weight, bias, norm).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        residual.add_(self.linear(x, weight, bias))
