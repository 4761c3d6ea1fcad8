"""A page writer that stores straight into the pools of other caches of the same process."""

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.stored_layers import Stages


class PeerWriter:
    """pools[pe][group]; own: which of them is the writer's. Counts the slots it wrote per PE, a layer at a time."""

    def __init__(self, own: int, pools: list[tuple[Tensor, ...]]) -> None:
        self._own = own
        self._pools = pools
        self.token_writes: list[tuple[int, int, int, int]] = []  # pe, group, layer, tokens
        self.slot_writes: list[tuple[int, int, int]] = []  # pe, group, slots
        self.stages: list[Stages] = []  # of those

    def write_tokens(
        self, pe: int, group: int, layer: int, k: Tensor, v: Tensor | None, token_indices: Tensor, slots: Tensor
    ) -> None:
        assert token_indices.dtype == torch.int64
        assert slots.dtype == torch.int32
        assert token_indices.shape == slots.shape
        pool = self._pools[pe][group]
        size = pool.shape[4]
        for token, slot in zip(token_indices.tolist(), slots.tolist(), strict=True):
            pool[slot // size, layer, 0, :, slot % size] = k[token]
            if v is not None:
                pool[slot // size, layer, 1, :, slot % size] = v[token]
        self.token_writes.append((pe, group, layer, len(slots)))

    def write_slots(
        self, pe: int, group: int, source_slots: Int32Array, target_slots: Int32Array, stages: Stages = ()
    ) -> None:
        assert source_slots.dtype == target_slots.dtype == np.int32
        source, target = self._pools[self._own][group], self._pools[pe][group]
        size = target.shape[4]
        for begin, end in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
            target[end // size, :, :, :, end % size] = source[begin // size, :, :, :, begin % size]
        self.slot_writes.append((pe, group, source_slots.size))
        self.stages.append(stages)

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        return self._pools[pe][group]


class UnmappedWriter(PeerWriter):
    """Its peers are not mapped: what a forward computes comes through write_tokens."""

    def peer_pool(self, pe: int, group: int) -> Tensor | None:
        return None
