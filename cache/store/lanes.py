"""Chooses the lanes that copy between pools and a store's memory, by the pools' device."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tandem.cache.store.copies import DirectLanes, Lanes
from tandem.cache.store.page_sums import words_of
from tandem.cache.store.stream_lanes import StreamLanes

Layers = Sequence[Sequence[int]]
"""The model's layers of each layer group."""

MakeLanes = Callable[[Sequence[Tensor], Sequence[Tensor], Layers, Sequence[int]], Lanes]
"""Makes lanes from pools, a store's memory for each, the layers of each, and the first layer of each stage."""


def lanes_of(pools: Sequence[Tensor], memory: Sequence[Tensor], layers: Layers, begins: Sequence[int]) -> Lanes:
    """The MakeLanes of the product. memory: uint8 [num_slots, page_bytes] for each pool, pinned on a GPU host."""
    if pools[0].device.type == "cuda":
        return StreamLanes(pools, memory, layers, begins)
    return DirectLanes([pool.view(pool.shape[0], -1) for pool in map(words_of, pools)], memory)
