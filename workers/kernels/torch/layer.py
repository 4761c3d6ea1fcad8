"""The reference of LayerKernels: plain torch, on any device."""

import torch.nn.functional as F
from torch import Tensor


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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)
