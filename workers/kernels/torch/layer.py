"""The references of LayerKernels and FusedGemms: plain torch, on any device."""

import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import Linear, RmsNorm


class TorchLayerKernels:
    """See LayerKernels."""

    def add_rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            x.add_(delta if delta.dim() == x.dim() else delta.sum(0).to(x.dtype))
        return _rms_norm(x, weight, eps)

    def norm_heads(self, heads: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(heads, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)
