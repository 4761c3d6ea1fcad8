"""Attention to a window of K and V that are the same numbers, and to compressed entries (DeepSeek-V4)."""

import torch
from torch import Tensor

from tandem.cache.kernels.base import Compression, IndexQuery
from tandem.workers.kernels.base import LayerKernels
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.compressed.fields import CompressedConfig
from tandem.workers.models.compressed.parameters import CompressorParameters, SharedParameters


class Compressor:
    """Computes what a layer's tokens contribute to compressed entries."""

    def __init__(self, config: CompressedConfig, parameters: CompressorParameters, eps: float) -> None:
        self._values, self._gates = parameters.values.prepare(), parameters.gates.prepare()
        self._bias, self._norms, self._eps = torch.cat(parameters.biases, 1), parameters.norms, eps
        self._shape = (config.index.num_heads, config.index.head_dim)
        self._scale = (config.index.num_heads * config.index.head_dim) ** -0.5
        self._query = None
        if parameters.query is not None:
            self._query = parameters.query.q_up.prepare(), parameters.query.weights

    def __call__(self, x: Tensor, q: Tensor) -> Compression:
        """Compresses x [T, H]; q [T, Q], normed."""
        query = None
        if self._query is not None:
            q_up, weights = self._query
            query = IndexQuery(q_up.linear(q).unflatten(1, self._shape), weights.linear(x).float().mul_(self._scale))
        values, gates = self._values.linear(x).float(), self._gates.linear(x).float()
        return Compression(values, gates, self._bias, self._norms, self._eps, query)


class SharedKVAttention:
    """q by two maps, normalised per head without a weight. Heads come out in groups, each with a map of its own."""

    def __init__(
        self,
        config: CompressedConfig,
        head_dim: int,
        eps: float,
        parameters: SharedParameters,
        kernels: LayerKernels,
    ) -> None:
        self._head_dim, self._eps, self._kernels = head_dim, eps, kernels
        self._groups = config.out_groups
        self._q_down, self._q_up = parameters.q_down.prepare(), parameters.q_up.prepare()
        self._kv = parameters.kv.prepare()
        self._q_norm, self._kv_norm, self._sinks = parameters.q_norm, parameters.kv_norm, parameters.sinks
        self._out = parameters.out.prepare()
        self._compressor = None
        if parameters.compressor is not None:
            self._compressor = Compressor(config, parameters.compressor, eps)

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        normed = self._norm(self._q_down.linear(x), self._q_norm)
        q = self._q_up.linear(normed).unflatten(1, (-1, self._head_dim))
        q = q * torch.rsqrt(q.float().square().mean(-1, keepdim=True) + self._eps).to(q.dtype)
        kv = self._norm(self._kv.linear(x), self._kv_norm).unsqueeze(1)
        compression = None if self._compressor is None else self._compressor(x, normed)
        o = cached.attend_shared(layer, q, kv, self._sinks, compression)
        grouped = o.reshape(o.shape[0], self._groups, -1).transpose(0, 1)
        return self._out(grouped).transpose(0, 1).flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.norm_heads(x.unsqueeze(1), weight.unsqueeze(0), self._eps).squeeze(1)
