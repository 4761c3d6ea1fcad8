"""A layer of Kimi Delta Attention in place of attention (arXiv 2510.26692)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.recurrent.fields import KdaConfig
from tandem.workers.models.recurrent.parameters import KdaParameters


class KimiDeltaAttention:
    """q, k and v go through a convolution into the state, whose rows decay each by itself. What is read from that is
    normalised and gated. Decays and gates are made by two maps each."""

    def __init__(self, config: KdaConfig, eps: float, parameters: KdaParameters) -> None:
        shape = config.shape
        self._sizes = (shape.channels, shape.output_dim, shape.output_dim, shape.heads)
        self._inputs, self._o_shape = parameters.inputs.prepare(), (shape.heads, shape.output_dim)
        self._forget, self._gate = parameters.forget.prepare(), parameters.gate.prepare()
        self._conv = parameters.conv.squeeze(1)
        self._decay, self._decay_bias = -parameters.decay.exp().view(-1, 1), parameters.decay_bias
        self._norm, self._eps = parameters.norm.float(), eps

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        """o [T, heads · value_dim] of x [T, H]."""
        mixed, forget, gate, b = self._inputs.linear(x).split_with_sizes(self._sizes, 1)
        rates = self._forget.linear(forget.contiguous()).float() + self._decay_bias
        log_decay = self._decay * F.softplus(rates).unflatten(1, self._o_shape)
        o = cached.recur(layer, RecurrentInputs(mixed, self._conv, log_decay, b.sigmoid().float()))
        return self._gated(o, self._gate.linear(gate.contiguous()).unflatten(1, self._o_shape)).flatten(1)

    def _gated(self, o: Tensor, gate: Tensor) -> Tensor:
        exact = o.float()
        normed = self._norm * exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._eps)
        return (normed * gate.float().sigmoid()).to(o.dtype)
