"""Latents of multi-head latent attention (DeepSeek-V2): see tandem.cache.plan.latent."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.cache.kernels.base import LatentBackend, Latents
from tandem.cache.kernels.gpu_limits import check_sizes, latent_sizes
from tandem.cache.kernels.torch.latent import TorchLatentKernels
from tandem.cache.kinds.index import top_k_beside
from tandem.cache.kinds.kind import ServedKind, Site
from tandem.cache.kinds.tensors import check_tensor
from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import ALL


@dataclass(frozen=True)
class Latent(ServedKind):
    """One plane of one head: `rank` numbers from which every head's K and V are made, then the rotated part of K
    that the heads share."""

    head_dim: int
    rank: int

    num_kv_heads = 1
    keeps = ALL
    planes = 1
    takes = Latents
    serves = "attend_latents"
    holds = "latents"
    needs_call = True
    of_latents = True
    whole_on_ranks = True

    @property
    def rotated(self) -> int:
        return self.head_dim - self.rank

    def fp8_rows(self, dtype: torch.dtype) -> Fp8Rows:
        """The latent in 8 bits; the rotated part, which no norm bounds, as it is."""
        return Fp8Rows(self.head_dim, self.rank, dtype)

    def check(self, index: int, groups: Sequence[LayerGroup], page_size: int) -> None:
        super().check(index, groups, page_size)
        if not 1 <= integer(f"rank of group {index}", self.rank) < self.head_dim:
            raise InvalidArgument(f"group {index} has rank {self.rank}; it must be from 1 to {self.head_dim - 1}")

    def backend(self, site: Site) -> LatentBackend:
        """Makes FlashInfer's backend for 16 bits on a GPU, else torch's."""
        heads = self._heads(site)
        scale, top_k = site.heads.scale_of(heads.key_dim + self.rotated), top_k_beside(site.layout, site.index)
        if site.device.type == "cuda" and site.dtype != torch.float32:
            from tandem.cache.kernels.flashinfer.latent import FlashInferLatentKernels  # needs triton
            from tandem.cache.kernels.flashinfer.latent_fp8 import Fp8LatentKernels

            on_gpu = FlashInferLatentKernels if site.rows is None else Fp8LatentKernels
            return on_gpu(site.pool, scale, self.rank, heads, top_k, site.rows)
        return TorchLatentKernels(site.pool, scale, self.rank, heads, top_k, site.rows)

    def check_inputs(self, num_tokens: int, x: Latents, site: Site) -> None:
        heads, num_heads = self._heads(site), x.up.weight.shape[0]
        if x.up.heads != heads:
            raise InvalidArgument(f"up.heads is {x.up.heads}; it must be {heads}")
        for name, tensor, shape in (
            ("q", x.q, (num_tokens, num_heads, heads.key_dim + self.rotated)),
            ("latents", x.latents, (num_tokens, self.rank)),
            ("keys", x.keys, (num_tokens, self.rotated)),
            ("up.weight", x.up.weight, (num_heads, heads.key_dim + heads.value_dim, self.rank)),
        ):
            check_tensor(name, tensor, shape, site.dtype, site.device)

    def check_gpu(self, index: int, layout: KVLayout, heads: LatentHeads | None) -> None:
        if layout.dtype != torch.float32 and heads is not None:
            check_sizes(layout.dtype, layout.page_size, latent_sizes(self.head_dim, self.rank, heads))

    def _heads(self, site: Site) -> LatentHeads:
        assert site.heads.latent is not None  # Heads.check has seen to it
        return site.heads.latent
