"""The references of LayerKernels and GroupedLinear: plain torch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.workers.kernels.base import Linear
from tandem.workers.kernels.expert_blocks import ExpertBlocks


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

    def clamped_swiglu(self, gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
        gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate.mul_(torch.sigmoid(gate * alpha)).mul_(up.add_(1))


def grouped_linear(x: Tensor, weights: Linear, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
    """See GroupedLinear. For tests: it reads the blocks on the host."""
    weight, bias = weights.weight, weights.bias
    y = torch.empty(blocks.num_pairs, weight.shape[1], dtype=torch.float32, device=x.device)
    for pairs, expert in zip(blocks.pairs.long(), blocks.experts.tolist(), strict=True):
        rows = pairs[pairs < blocks.num_pairs]
        if expert < weight.shape[0]:
            y[rows] = x[rows // fan_out].float() @ weight[expert].float().T
            if bias is not None:
                y[rows] += bias[expert].float()
    if scale is not None:
        y *= scale[:, None]
    return y.to(x.dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)
