"""A layer's attention between the norm before it and the projection after it: with K and V, or with latents."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.workers.kernels.base import LayerKernels
from tandem.workers.models.blocks.cached_attention import CachedAttention
from tandem.workers.models.compressed.attention import SharedKVAttention
from tandem.workers.models.compressed.parameters import SharedParameters
from tandem.workers.models.config import ModelConfig
from tandem.workers.models.indexer.indexer import Indexer
from tandem.workers.models.indexer.row_order import halves_first
from tandem.workers.models.latent import LatentConfig
from tandem.workers.models.parameters import AnyAttention, AttentionParameters, LatentParameters
from tandem.workers.models.recurrent.choice import prepare_recurrent
from tandem.workers.models.recurrent.parameters import RecurrentParameters
from tandem.workers.models.window_fields import ChunkedConfig
from tandem.workers.ranks.ranks import ALONE, Ranks

LATENT_NORM_EPS = 1e-6  # transformers gives these norms their class's, not the config's


AttentionBlock = Callable[[Tensor, int, CachedAttention], Tensor]
"""(x [T, hidden], layer, cached) -> o [T, num_heads · head_dim]."""


def prepare_attention(
    config: ModelConfig,
    layer: int,
    parameters: AnyAttention,
    kernels: LayerKernels,
    ranks: Ranks = ALONE,
) -> AttentionBlock:
    """ranks: of the config's shard."""
    if isinstance(parameters, RecurrentParameters):
        assert config.recurrent is not None  # parameters of a state come from it
        return prepare_recurrent(config.recurrent, config.rms_norm_eps, parameters, ranks)
    if isinstance(parameters, SharedParameters):
        assert config.compressed is not None  # parameters of one plane come from it
        return SharedKVAttention(config.compressed, config.head_dim, config.rms_norm_eps, parameters, kernels)
    if isinstance(parameters, AttentionParameters):
        if config.chunked is not None:
            return ChunkedAttention(config, config.chunked, layer, parameters, kernels)
        if layer in config.readers:
            return ReadingAttention(config, layer, parameters, kernels)
        if config.gated_output:
            return GatedOutputAttention(config, layer, parameters, kernels)
        block = NormedValueAttention if config.value_norm else GroupedQueryAttention
        return block(config, layer, parameters, kernels)
    assert config.latent is not None  # parameters with latents come from it
    return LatentAttention(config.latent, config.num_heads, parameters, kernels)


class GroupedQueryAttention:
    """K and V of a head serve several heads of q. qk_norm: what q and k go through before they are rotated."""

    def __init__(self, config: ModelConfig, layer: int, parameters: AttentionParameters, kernels: LayerKernels) -> None:
        self._counts, self._head_dim = config.qkv_heads(layer), config.heads_of(layer).head_dim
        self.qkv = parameters.qkv.prepare()
        norms = [one for one in (parameters.q_norm, parameters.k_norm) if one is not None]
        self.qk_norm = None
        if norms:  # those of all heads in one tensor, so that one call normalises both
            pairs = zip(norms, (config.num_heads, *self._counts[1:]), strict=False)
            weight = torch.cat([norm.expand(count, self._head_dim) for norm, count in pairs])
            self.qk_norm = HeadNorm(weight, config.rms_norm_eps, kernels.norm_heads)
        self._sinks = parameters.sinks
        self._padding = config.stored_head_dim(self._head_dim) - self._head_dim

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        q, k, v = self._split(self.qkv.linear(x))
        return self._attend(q, k, v, self.qk_norm, layer, cached)

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return split_heads(qkv, self._head_dim, self._counts)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, norm: HeadNorm | None, layer: int, cached: CachedAttention
    ) -> Tensor:
        if not self._padding:
            return cached.attend(layer, q, k, v, self._sinks, norm).flatten(1)
        if norm is not None:
            q, k = norm.apply(q, k)
        q, k, v = (F.pad(heads, (0, self._padding)) for heads in (q, k, v))
        return cached.attend(layer, q, k, v, self._sinks, None)[:, :, : self._head_dim].flatten(1)


class GatedOutputAttention(GroupedQueryAttention):
    """Attention with gates. After each head of q the first product has a gate, whose sigmoid multiplies the head's
    output."""

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        heads, k, v = self._split(self.qkv.linear(x))
        q, gate = heads.unflatten(1, (-1, 2)).unbind(2)
        return self._attend(q, k, v, self.qk_norm, layer, cached) * gate.flatten(1).sigmoid()


class NormedValueAttention(GroupedQueryAttention):
    """Heads of v are normalised, too, without a weight. Where no v is computed, it is k as that was computed."""

    def __init__(self, config: ModelConfig, layer: int, parameters: AttentionParameters, kernels: LayerKernels) -> None:
        super().__init__(config, layer, parameters, kernels)
        self._kernels, self._eps = kernels, config.rms_norm_eps
        dtype = torch.float32 if config.float32_norms else config.dtype
        self._ones = torch.ones(self._counts[-1], self._head_dim, dtype=dtype, device=parameters.qkv.device)

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        heads = self._split(self.qkv.linear(x))
        v = self._kernels.norm_heads(heads[-1], self._ones, self._eps)
        return self._attend(heads[0], heads[1], v, self.qk_norm, layer, cached)


class ReadingAttention(GroupedQueryAttention):
    """Makes q alone, and attends to what another layer has stored."""

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        (q,) = self._split(self.qkv.linear(x))
        if not self._padding:
            return cached.read(layer, q, self._sinks, self.qk_norm).flatten(1)
        q = q if self.qk_norm is None else self.qk_norm.apply_to_queries(q)
        o = cached.read(layer, F.pad(q, (0, self._padding)), self._sinks, None)
        return o[:, :, : self._head_dim].flatten(1)


class ChunkedAttention(GroupedQueryAttention):
    """Attention by ChunkedConfig. The norm comes after the rotation. Without a weight their order does not matter."""

    def __init__(
        self,
        config: ModelConfig,
        chunked: ChunkedConfig,
        layer: int,
        parameters: AttentionParameters,
        kernels: LayerKernels,
    ) -> None:
        """Puts rows of interleaved rotated numbers in order, in `parameters`."""
        heads = config.num_heads + config.num_kv_heads
        for rows in parameters.qkv.slice(0, heads * config.head_dim).tensors().values():
            halves_first(rows.unflatten(0, (heads, config.head_dim)))
        super().__init__(config, layer, parameters, kernels)
        self._chunked = chunked
        if chunked.qk_norm:
            weight = torch.ones(heads, config.head_dim, dtype=config.dtype, device=parameters.qkv.device)
            self.qk_norm = HeadNorm(weight, config.rms_norm_eps, kernels.norm_heads)

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        q, k, v = self._split(self.qkv.linear(x))
        if layer in self._chunked.layers:
            return self._attend(q, k, v, self.qk_norm, layer, cached)
        if self._chunked.temperature is not None:
            q = (q * cached.temperatures(self._chunked.temperature)).to(q.dtype)
        return self._attend(q, k, v, None, layer, cached)


class LatentAttention:
    """q, by one map or two; the normalised latent and the shared key, which the cache keeps in place of K and V."""

    def __init__(
        self, config: LatentConfig, num_heads: int, parameters: LatentParameters, kernels: LayerKernels
    ) -> None:
        """Puts rows of interleaved rotated numbers in order, in `parameters`."""
        self._config = config
        self._num_heads = num_heads
        self._kernels = kernels
        down, q_rows = parameters.down, parameters.down.rows - config.rank - config.rotated
        if config.interleaved:
            q = down.slice(0, q_rows) if parameters.q_up is None else parameters.q_up
            for rows in q.tensors().values():
                halves_first(rows.unflatten(0, (num_heads, config.query_dim))[:, config.heads.key_dim :])
            for rows in down.slice(down.rows - config.rotated, down.rows).tensors().values():
                halves_first(rows.unsqueeze(0))
        self._down = down.prepare()
        self._sizes = (q_rows, config.rank, config.rotated)
        self._q_norm = parameters.q_norm
        self._q_up = None if parameters.q_up is None else parameters.q_up.prepare()
        self._latent_norm = parameters.latent_norm
        self._up = UpProjections(parameters.up.tensor().unflatten(0, (num_heads, -1)), config.heads)
        self._indexer = None
        if parameters.index is not None:
            assert config.index is not None  # parameters of an indexer come from it
            self._indexer = Indexer(config.index, config.rotated, parameters.index)

    def __call__(self, x: Tensor, layer: int, cached: CachedAttention) -> Tensor:
        q, latents, keys = self._down.linear(x).split_with_sizes(self._sizes, 1)
        choice = None
        if self._q_up is not None and self._q_norm is not None:
            normed = self._norm(q, self._q_norm)
            choice = None if self._indexer is None else self._indexer(x, normed)
            q = self._q_up.linear(normed)
        q = q.unflatten(1, (self._num_heads, self._config.query_dim))
        latents = self._norm(latents, self._latent_norm)
        return cached.attend_latents(layer, q, latents, keys, self._up, choice).flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.norm_heads(x.unsqueeze(1), weight.unsqueeze(0), LATENT_NORM_EPS).squeeze(1)


def split_heads(qkv: Tensor, head_dim: int, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """The first counts[0] heads of qkv [T, Σ counts · head_dim], and so on: [T, count, head_dim]; views, rows of one
    stride."""
    return qkv.view(qkv.shape[0], -1, head_dim).split_with_sizes(counts, 1)
