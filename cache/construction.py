"""What a paged KV cache is made of must fit together."""

from collections.abc import Sequence

from torch import Tensor

from tandem.cache.errors import InvalidArgument
from tandem.cache.layout import KVLayout
from tandem.cache.rope import RopeParameters


def check_construction(
    layout: KVLayout, pools: Sequence[Tensor], rope: RopeParameters, max_sequence_length: int
) -> None:
    if len(pools) != len(layout.groups):
        raise InvalidArgument(f"{len(pools)} pools were given; the layout has {len(layout.groups)} groups")
    for group, pool in enumerate(pools):
        shape = ("num_pages ≥ 1", *layout.page_shape(group))
        if pool.shape[1:] != shape[1:] or pool.shape[0] < 1 or pool.dtype != layout.dtype or not pool.is_contiguous():
            raise InvalidArgument(
                f"pool {group} is {tuple(pool.shape)} of {pool.dtype}; it must be {shape} of {layout.dtype}, contiguous"
            )
    if max_sequence_length < 1:
        raise InvalidArgument(f"max_sequence_length is {max_sequence_length}; it must be at least 1")
    head_dim = min(group.head_dim for group in layout.groups)
    if rope.rope_type != "none" and rope.rotary_dim > head_dim:
        raise InvalidArgument(f"rotary_dim is {rope.rotary_dim}; the smallest head_dim is {head_dim}")
