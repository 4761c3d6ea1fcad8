"""The layer groups of a cache, made from its layout: what each does in a forward."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_index_kernels, choose_latent_kernels
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.arrays import check_factor
from tandem.cache.plan.attention_inputs import AttentionInputs, IndexInputs, LatentInputs
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.stored_layers import StoredLayers

LayerGroups = list[GroupAttention]


@dataclass(frozen=True)
class Heads:
    """How all layers attend; see PagedKVCache."""

    scale: float | None
    softcap: float | None
    latent: LatentHeads | None

    def check(self, layout: KVLayout) -> None:
        """InvalidArgument unless a cache of `layout` can have them."""
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None:
                check_factor(name, value)
        latent = self.latent
        if layout.has_latents != (latent is not None):
            raise InvalidArgument(
                f"latent is {latent}; it must be given exactly when the layout has groups with latents"
            )
        if latent is not None and min(latent.key_dim, latent.value_dim) < 1:
            raise InvalidArgument(f"latent is {latent}; both sizes must be at least 1")
        if latent is not None and self.softcap is not None:
            raise InvalidArgument(f"softcap is {self.softcap}; with latents it must be None")

    def scale_of(self, width: int) -> float:
        """width: of q."""
        return width**-0.5 if self.scale is None else self.scale


def make_groups(
    layout: KVLayout,
    pools: Sequence[Tensor],
    tables: Sequence[GroupTable],
    writer: PageWriter | None,
    heads: Heads,
    kernels: KernelFactory,
) -> LayerGroups:
    """One for each group of the layout, whose pools and tables these are; kernels: the backends of those with K and V.

    Raises InvalidArgument.
    """
    heads.check(layout)
    groups, latent = [], heads.latent
    for index, (pool, group, table) in enumerate(zip(pools, layout.groups, tables, strict=True)):
        stored = StoredLayers(len(group.layers)) if pool.is_cuda and writer is not None else None
        fp8, rank = Fp8Entries.of_group(layout, index, pool.device), group.latent_rank
        if rank is not None and group.top_k is not None:
            backend = choose_index_kernels(pool, rank, group.top_k)
            inputs = IndexInputs(rank, group.head_dim - rank, layout.dtype, pool.device)
        elif rank is not None and latent is not None:
            rotated = group.head_dim - rank
            scale, top_k = heads.scale_of(latent.key_dim + rotated), layout.top_k_of(group)
            backend = choose_latent_kernels(pool, scale, rank, latent, top_k)
            inputs = LatentInputs(latent, rank, rotated, layout.dtype, pool.device)
        else:
            scoring = Scoring(heads.scale_of(group.head_dim), group.keeps.window, heads.softcap)
            backend = kernels(pool, scoring, fp8)
            inputs = AttentionInputs(group.num_kv_heads, group.head_dim, layout.dtype, pool.device)
        groups.append(GroupAttention(index, backend, inputs, fp8, table, writer, stored, group.keeps.chunk))
    return groups
