"""The layer groups of a cache, made from its layout: what each does in a forward."""

from collections.abc import Sequence

from torch import Tensor

from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kinds.heads import Heads
from tandem.cache.kinds.kind import Site, kind_of
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.stored_layers import StoredLayers

LayerGroups = list[GroupAttention]


def heads_of_groups(heads: Heads, layout: KVLayout) -> list[Heads]:
    """Returns the heads of each group of a layout. InvalidArgument unless a cache of that layout can have them."""
    latents = [kind_of(group).of_latents for group in layout.groups]
    heads.check(of_latents=any(latents))
    plain = Heads(heads.scale, heads.softcap, None)
    return [heads if of_latents else plain for of_latents in latents]


def make_groups(
    layout: KVLayout,
    pools: Sequence[Tensor],
    tables: Sequence[GroupTable],
    writer: PageWriter | None,
    heads: Sequence[Heads],
    kernels: KernelFactory,
    encoder_lens: Int64Array | None = None,
) -> LayerGroups:
    """Makes the attention of each group of the layout from the groups' pools, tables and heads. kernels: the backends
    of groups with K and V. encoder_lens: see GroupAttention.

    Raises InvalidArgument.
    """
    groups = []
    for index, (pool, group, table, own) in enumerate(zip(pools, layout.groups, tables, heads, strict=True)):
        kind = kind_of(group)
        own.check(of_latents=kind.of_latents)
        site = Site(layout, index, pool, own, kernels)
        stored = StoredLayers(len(group.layers)) if pool.is_cuda and writer is not None else None
        groups.append(GroupAttention(kind, site, kind.backend(site), table, writer, stored, encoder_lens))
    return groups
