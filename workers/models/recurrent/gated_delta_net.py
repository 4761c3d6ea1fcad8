"""A layer with a gated delta rule in place of attention (Yang et al., arXiv 2412.06464)."""

import torch
from torch import Tensor

from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.workers.kernels.choice import choose_delta_kernels
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
        self._kernels = choose_delta_kernels(parameters.norm.device, parameters.norm.dtype)

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        """o [T, value_heads · value_dim] of x [T, H]."""
        mixed, z = self._split_inputs(self._inputs.linear(x))
        b, a = self._split_rates(self._rates.linear(x))
        log_decay, strength = self._kernels.rates(b, a, self._decay, self._decay_bias)
        o = cached.recur(layer, RecurrentInputs(mixed, self._conv, log_decay, strength))
        return self._kernels.gate(o, z, self._norm, self._eps)

    def _split_inputs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """q, k and v [T, channels], and z in groups of value heads, [T, G, value_heads · value_dim / G]."""
        shape = self._shape
        if not self._by_key_head:
            mixed, z = inputs.tensor_split((shape.channels,), 1)
            return mixed, z.unsqueeze(1)
        values = shape.value_heads // shape.key_heads * shape.value_dim
        sizes = shape.key_dim, shape.key_dim, values, values
        *qkv, z = inputs.unflatten(1, (shape.key_heads, -1)).split_with_sizes(sizes, 2)
        return torch.cat([one.flatten(1) for one in qkv], 1), z

    def _split_rates(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Splits rates into b and a, [T, G, value_heads / G] each."""
        groups = self._shape.key_heads if self._by_key_head else 1
        b, a = rates.unflatten(1, (groups, 2, -1)).unbind(2)
        return b, a
