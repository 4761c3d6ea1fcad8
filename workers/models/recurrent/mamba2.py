"""A Mamba-2 layer in place of attention (Dao and Gu, arXiv 2405.21060)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.kernels.recurrent import RecurrentInputs
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.recurrent.fields import Mamba2Config
from tandem.workers.models.recurrent.parameters import Mamba2Parameters
from tandem.workers.ranks.ranks import ALONE, Ranks


class Mamba2:
    """x, B and C go through a convolution into the state. What is read from that is gated by z, then normalised."""

    def __init__(self, config: Mamba2Config, eps: float, parameters: Mamba2Parameters, ranks: Ranks = ALONE) -> None:
        shape = config.shape
        self._sizes = (shape.heads * shape.output_dim, shape.channels, shape.heads)
        self._inputs = parameters.inputs.prepare()
        self._conv, self._conv_bias = parameters.conv.squeeze(1), parameters.conv_bias
        self._decay, self._delta_bias = -parameters.decay.exp(), parameters.decay_bias
        self._skip = parameters.skip
        self._norm, self._groups, self._eps = parameters.norm.float(), shape.groups, eps
        self._ranks, self._sharers = ranks, config.sharers

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        """o [T, heads · head_dim] of x [T, H]."""
        z, mixed, rates = self._inputs.linear(x).split_with_sizes(self._sizes, 1)
        delta = F.softplus(rates.float() + self._delta_bias)
        inputs = RecurrentInputs(mixed, self._conv, self._decay * delta, delta, self._conv_bias, self._skip)
        return self._gated(cached.recur(layer, inputs).flatten(1), z)

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        parts = (o.float() * F.silu(z.float())).unflatten(1, (self._groups, -1))
        normed = parts * torch.rsqrt(self._mean_of_all(parts.square().mean(-1, keepdim=True)) + self._eps)
        return (self._norm * normed.flatten(1)).to(o.dtype)

    def _mean_of_all(self, means: Tensor) -> Tensor:
        """The mean over all ranks that share a group, of each one's [T, groups, 1]. Such a rank has one group."""
        if self._sharers == 1:
            return means
        of_ranks = self._ranks.gather(means.flatten(1), self._ranks.size)
        first = self._ranks.rank // self._sharers * self._sharers
        return of_ranks[:, first : first + self._sharers].mean(1).view(-1, 1, 1)
