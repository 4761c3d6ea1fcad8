"""A layer with a gated delta rule in place of attention (Yang et al., arXiv 2412.06464)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.recurrent.fields import DeltaNetConfig
from tandem.workers.models.recurrent.parameters import DeltaNetParameters


class GatedDeltaNet:
    """q, k and v go through a convolution into the state. What is read from that is normalised and gated by z."""

    def __init__(self, config: DeltaNetConfig, eps: float, parameters: DeltaNetParameters) -> None:
        self._shape, self._by_key_head, self._eps = config.shape, config.by_key_head, eps
        self._inputs, self._rates = parameters.inputs.prepare(), parameters.rates.prepare()
        self._conv = parameters.conv.squeeze(1)
        self._decay, self._decay_bias = -parameters.decay.exp(), parameters.decay_bias
        self._norm = parameters.norm

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        """o [T, value_heads · value_dim] of x [T, H]."""
        mixed, z = self._split_inputs(self._inputs.linear(x))
        b, a = self._split_rates(self._rates.linear(x))
        log_decay = self._decay * F.softplus(a.float() + self._decay_bias)
        o = cached.recur(layer, RecurrentInputs(mixed, self._conv, log_decay, b.sigmoid().float()))
        return self._gated(o, z.unflatten(1, o.shape[1:])).flatten(1)

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        """Rounds where transformers does."""
        exact = o.float()
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self._eps)
        return (self._norm * normed.to(o.dtype) * F.silu(z.float())).to(o.dtype)

    def _split_inputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """q, k and v [T, channels], and z [T, value_heads · value_dim]."""
        shape = self._shape
        if not self._by_key_head:
            mixed, z = inputs.tensor_split((shape.channels,), 1)
            return mixed, z
        values = shape.value_heads // shape.key_heads * shape.value_dim
        sizes = shape.key_dim, shape.key_dim, values, values
        *qkv, z = inputs.unflatten(1, (shape.key_heads, -1)).split_with_sizes(sizes, 2)
        return torch.cat([one.flatten(1) for one in qkv], 1), z.flatten(1)

    def _split_rates(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """b and a, [T, value_heads] each."""
        if self._by_key_head:
            b, a = rates.unflatten(1, (self._shape.key_heads, 2, -1)).unbind(2)
            return b.flatten(1), a.flatten(1)
        b, a = rates.chunk(2, 1)
        return b, a
