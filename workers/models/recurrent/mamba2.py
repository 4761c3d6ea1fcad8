"""A Mamba-2 layer in place of attention (Dao and Gu, arXiv 2405.21060)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.recurrent.fields import Mamba2Config
from tandem.workers.models.recurrent.parameters import Mamba2Parameters


class Mamba2:
    """x, B and C go through a convolution into the state. What is read from that is gated by z, then normalised."""

    def __init__(self, config: Mamba2Config, eps: float, parameters: Mamba2Parameters) -> None:
        shape = config.shape
        self._sizes = (shape.heads * shape.output_dim, shape.channels, shape.heads)
        self._inputs = parameters.inputs.prepare()
        self._conv, self._conv_bias = parameters.conv.squeeze(1), parameters.conv_bias
        self._decay, self._delta_bias = -parameters.decay.exp(), parameters.decay_bias
        self._skip = parameters.skip
        self._norm, self._groups, self._eps = parameters.norm.float(), config.norm_groups, eps

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        """o [T, heads · head_dim] of x [T, H]."""
        z, mixed, rates = self._inputs.linear(x).split_with_sizes(self._sizes, 1)
        delta = F.softplus(rates.float() + self._delta_bias)
        inputs = RecurrentInputs(mixed, self._conv, self._decay * delta, delta, self._conv_bias, self._skip)
        return self._gated(cached.recur(layer, inputs).flatten(1), z)

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        parts = (o.float() * F.silu(z.float())).unflatten(1, (self._groups, -1))
        normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self._eps)
        return (self._norm * normed.flatten(1)).to(o.dtype)
