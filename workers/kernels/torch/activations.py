"""What stands between the products of a feed-forward where it is not LayerKernels.silu_mul: plain torch, any device."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) · up [n, I] of gate_up [n, 2·I], gate first; gelu's tanh approximation."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate · sigmoid(alpha · gate) · (up + 1), [n, I], of gate_up [n, 2·I] in which gate and up alternate.

    Before that gate is clamped to at most limit, and up to -limit … limit.
    """
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate.mul_(torch.sigmoid(gate * alpha)).mul_(up.add_(1))
