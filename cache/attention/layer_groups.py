"""The layer groups of a cache, made from its layout: what each does in a forward."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_index_kernels, choose_latent_kernels
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.compressed import TorchSharedKernels
from tandem.cache.kernels.torch.entries import TorchEntryKernels
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.arrays import Int64Array, check_factor
from tandem.cache.plan.attention_inputs import AttentionInputs, EntryInputs, IndexInputs, LatentInputs, SharedInputs
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.stored_layers import StoredLayers

LayerGroups = list[GroupAttention]


@dataclass(frozen=True)
class Heads:
    """How the layers of a group, or of all groups, attend; see PagedKVCache."""

    scale: float | None
    softcap: float | None
    latent: LatentHeads | None

    def of_groups(self, layout: KVLayout) -> "list[Heads]":
        """For each group of a layout. InvalidArgument unless a cache of it can have them."""
        self.check(has_latents=layout.has_latents)
        plain = Heads(self.scale, self.softcap, None)
        return [plain if group.latent_rank is None else self for group in layout.groups]

    def check(self, *, has_latents: bool) -> None:
        """InvalidArgument unless groups can have them, with latents or without."""
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None:
                check_factor(name, value)
        latent = self.latent
        if has_latents != (latent is not None):
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
    heads: Sequence[Heads],
    kernels: KernelFactory,
    encoder_lens: Int64Array | None = None,
) -> LayerGroups:
    """One for each group of the layout, whose pools, tables and heads these are; kernels: the backends of those with K
    and V. encoder_lens: see GroupAttention.

    Raises InvalidArgument.
    """
    groups = []
    for index, (pool, group, table, own) in enumerate(zip(pools, layout.groups, tables, heads, strict=True)):
        own.check(has_latents=group.latent_rank is not None)
        latent = own.latent
        stored = StoredLayers(len(group.layers)) if pool.is_cuda and writer is not None else None
        fp8, rank = Fp8Entries.of_group(layout, index, pool.device), group.latent_rank
        if group.beside:
            backend, dtype = TorchEntryKernels(pool), layout.stored_dtype_of(index)
            inputs = EntryInputs(group.planes, group.num_kv_heads, group.head_dim, dtype, pool.device)
        elif group.shares_planes:
            window = group.keeps.window
            assert window is not None  # the layout has checked it
            backend = TorchSharedKernels(pool, own.scale_of(group.head_dim), window)
            inputs = SharedInputs(group.head_dim, layout.dtype, pool.device)
        elif rank is not None and group.top_k is not None:
            backend = choose_index_kernels(pool, rank, group.top_k)
            inputs = IndexInputs(rank, group.head_dim - rank, layout.dtype, pool.device)
        elif rank is not None and latent is not None:
            rotated = group.head_dim - rank
            scale, top_k = own.scale_of(latent.key_dim + rotated), layout.top_k_of(group)
            backend = choose_latent_kernels(pool, scale, rank, latent, top_k)
            inputs = LatentInputs(latent, rank, rotated, layout.dtype, pool.device)
        else:
            scoring = Scoring(own.scale_of(group.head_dim), group.keeps.window, own.softcap)
            backend = kernels(pool, scoring, fp8)
            inputs = AttentionInputs(group.num_kv_heads, group.head_dim, layout.dtype, pool.device)
        keeps = group.keeps
        kind = (keeps.chunk, keeps.drops_past, encoder_lens, keeps.given)
        groups.append(GroupAttention(index, backend, inputs, fp8, table, writer, stored, *kind))
    return groups
