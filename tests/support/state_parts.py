"""Cuts a rank's part of recurrent states out of whole ones, head by head."""

import torch
from torch import Tensor

from tandem.cache.kernels.recurrent import DeltaShape, SsdShape, StateShape
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.recurrent import Recurrent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.shard import Shard

KV_HEADS, WIDTH = 8, 4
DELTA = DeltaShape(key_heads=2, value_heads=8, key_dim=3, value_dim=5, tail=2)
SSD = SsdShape(num_heads=8, groups=2, head_dim=3, state_size=5, tail=3)


def layout_of(shape: StateShape, shard: Shard, page_size: int) -> KVLayout:
    """A layer with K and V between two with states."""
    kv = LayerGroup((1,), KV(KV_HEADS // shard.size, WIDTH))
    states = LayerGroup((0, 2), Recurrent(shape.divided(shard), shape.sharers(shard)))
    return KVLayout((kv, states), page_size, torch.float32, shard=shard)


def part_of_entries(entries: Tensor, shape: StateShape, shard: Shard) -> Tensor:
    """Returns a rank's part of whole entries [..., numbers]. Each rank has the same number of heads, and all heads that
    serve them."""
    if isinstance(shape, DeltaShape):
        serving, keys = shape.key_heads, (shape.key_heads, shape.key_dim)
        channels = keys, keys, (shape.value_heads, shape.value_dim)
    else:
        assert isinstance(shape, SsdShape)
        serving, of_groups = shape.groups, (shape.groups, shape.state_size)
        channels = (shape.num_heads, shape.head_dim), of_groups, of_groups
    each = shape.heads // shard.size
    heads = list(range(shard.rank * each, (shard.rank + 1) * each))
    served_by = sorted({head * serving // shape.heads for head in heads})
    rows = entries[..., : shape.tail * shape.channels].unflatten(-1, (shape.tail, shape.channels))
    pieces = zip(rows.split([count * size for count, size in channels], -1), channels, strict=True)
    tails = [
        piece.unflatten(-1, sizes)[..., heads if sizes[0] == shape.heads else served_by, :].flatten(-2)
        for piece, sizes in pieces
    ]
    states = entries[..., shape.tail * shape.channels :].unflatten(-1, shape.state)[..., heads, :, :]
    return torch.cat((torch.cat(tails, -1).flatten(-2), states.flatten(-3)), -1)


def part_of_pools(pools: list[Tensor], shape: StateShape, shard: Shard) -> list[Tensor]:
    """Returns a rank's part of a whole model's pools: KV heads of the first, numbers of the second."""
    each = KV_HEADS // shard.size
    heads = slice(shard.rank * each, (shard.rank + 1) * each)
    return [pools[0][:, :, :, heads], part_of_entries(pools[1], shape, shard)]
