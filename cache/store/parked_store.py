"""Parked sequences in host memory: they gave up their pages to others, and continue later."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument

ALIGNMENT = 64  # of a group's slots, in bytes


class ParkedCounts(NamedTuple):
    """Sequences in a store, the bytes that they take, and its capacity in bytes."""

    sequences: int = 0
    used: int = 0
    capacity: int = 0


class ParkedStore:
    """Slots for pages of each layer group, in one buffer, which is pinned on a GPU host. Copies are queued on the
    current stream. A sequence keeps its slots until drop()."""

    def __init__(self, pools: Sequence[Tensor], num_slots: Sequence[int]) -> None:
        """pools: one for each layer group, see PagedKVCache. num_slots: pages of each group that it can hold."""
        if len(num_slots) != len(pools) or min(num_slots) < 0:
            raise InvalidArgument(f"num_slots is {tuple(num_slots)}; {len(pools)} counts of at least 0 are accepted")
        self._pools = [pool.view(torch.uint8).view(pool.shape[0], -1) for pool in pools]
        self._free = [list(range(count))[::-1] for count in num_slots]
        self._slots: dict[int, list[list[int]]] = {}  # by sequence, of each group
        sizes = [count * pool.shape[1] for pool, count in zip(self._pools, num_slots, strict=True)]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        whole = _allocate(ends[-1], pinned=pools[0].device.type == "cuda")
        self._memory = [
            whole[begin : begin + size].view(count, pool.shape[1])
            for begin, size, count, pool in zip([0, *ends], sizes, num_slots, self._pools, strict=False)
        ]
        self._capacity = ends[-1]

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._slots

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether there is room for this many pages of each group."""
        return all(count <= len(free) for count, free in zip(counts, self._free, strict=True))

    def put(self, sequence: int, pages: Sequence[Int32Array]) -> None:
        """Copies a sequence's pages, int32 [n] of each group; see fits(). Later work on the current stream may
        overwrite the pages. A peer may do so once the device has made the copies."""
        slots = self._slots[sequence] = [[free.pop() for _ in ids] for free, ids in zip(self._free, pages, strict=True)]
        for memory, pool, own, ids in zip(self._memory, self._pools, slots, pages, strict=True):
            for slot, page in zip(own, ids.tolist(), strict=True):
                memory[slot].copy_(pool[page], non_blocking=True)

    def fetch(self, sequence: int, pages: Sequence[Int32Array]) -> None:
        """Copies a sequence back into as many pages of each group, in the same order."""
        for memory, pool, own, ids in zip(self._memory, self._pools, self._slots[sequence], pages, strict=True):
            for slot, page in zip(own, ids.tolist(), strict=True):
                pool[page].copy_(memory[slot], non_blocking=True)

    def drop(self, sequence: int) -> None:
        """Frees a sequence's slots. Idempotent."""
        for free, own in zip(self._free, self._slots.pop(sequence, ()), strict=False):
            free += reversed(own)

    @property
    def counts(self) -> ParkedCounts:
        used = sum(
            len(own) * pool.shape[1]
            for slots in self._slots.values()
            for own, pool in zip(slots, self._pools, strict=True)
        )
        return ParkedCounts(len(self._slots), used, self._capacity)


def _allocate(num_bytes: int, *, pinned: bool) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise MemoryError(
            f"cache.parked_bytes: this host has no {num_bytes} bytes left; fewer are accepted: {error}"
        ) from error
