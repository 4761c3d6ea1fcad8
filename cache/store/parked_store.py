"""Parked sequences in host memory: they gave up their pages to others, and continue later."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.copies import Moves, PageCopies
from tandem.cache.store.lanes import MakeLanes, lanes_of

ALIGNMENT = 64  # of a group's slots, in bytes


class ParkedCounts(NamedTuple):
    """Sequences in a store, the bytes that they take, and its capacity in bytes."""

    sequences: int = 0
    used: int = 0
    capacity: int = 0


class ParkedStore:
    """Slots for pages of each layer group, in one buffer, which is pinned on a GPU host. A sequence keeps its slots
    until drop().

    Copies run on lanes, in parallel with forwards, and may be under way when a call returns: see PageCopies.
    """

    def __init__(
        self,
        pools: Sequence[Tensor],
        num_slots: Sequence[int],
        copies: PageCopies | None = None,
        make_lanes: MakeLanes | None = None,
    ) -> None:
        """pools: one for each layer group, see PagedKVCache. num_slots: pages of each group that it can hold. copies:
        the copies of the store behind the prefix index, if there is one; both stores then use the same lanes.
        make_lanes: None chooses lanes by the pools' device."""
        if len(num_slots) != len(pools) or min(num_slots) < 0:
            raise InvalidArgument(f"num_slots is {tuple(num_slots)}; it must be {len(pools)} counts of at least 0")
        self._page_bytes = [pool[0].nbytes for pool in pools]
        self._free = [list(range(count))[::-1] for count in num_slots]
        self._slots: dict[int, list[Int32Array]] = {}  # by sequence, of each group
        sizes = [count * size for count, size in zip(num_slots, self._page_bytes, strict=True)]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        whole = _allocate(ends[-1], pinned=pools[0].device.type == "cuda")
        # Lanes on a GPU know addresses alone: the store owns the memory.
        self._memory = memory = [
            whole[begin : begin + size].view(count, page)
            for begin, size, count, page in zip([0, *ends], sizes, num_slots, self._page_bytes, strict=False)
        ]
        self._capacity = ends[-1]
        if copies is None:
            lanes = (make_lanes or lanes_of)(pools, memory, [range(1)] * len(pools), [0])
            num_pages = [pool.shape[0] for pool in pools]
            self.copies, self._number = PageCopies(lanes, num_pages, num_slots, self._page_bytes), 0
        else:
            self.copies, self._number = copies, copies.extend(memory)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._slots

    def fits(self, counts: Sequence[int]) -> bool:
        """Returns whether there is room for this many pages of each group."""
        return all(count <= len(free) for count, free in zip(counts, self._free, strict=True))

    def put(self, sequence: int, pages: Sequence[Int32Array]) -> None:
        """Copies a sequence's pages, int32 [n] of each group; see fits(). The next write to them waits for that."""
        slots = [[free.pop() for _ in ids] for free, ids in zip(self._free, pages, strict=True)]
        self._slots[sequence] = [np.array(own, np.int32) for own in slots]
        self.copies.down(self._moves(sequence, pages))

    def fetch(self, sequence: int, pages: Sequence[Int32Array]) -> None:
        """Copies a sequence back into as many pages of each group, in the same order. The next read or
        write of them waits for that."""
        self.copies.up(self._moves(sequence, pages))

    def drop(self, sequence: int) -> None:
        """Frees a sequence's slots. The next copies into them wait for the sequence's copies. Idempotent."""
        for free, own in zip(self._free, self._slots.pop(sequence, ()), strict=False):
            free += own[::-1].tolist()

    @property
    def counts(self) -> ParkedCounts:
        used = sum(
            own.size * size for slots in self._slots.values() for own, size in zip(slots, self._page_bytes, strict=True)
        )
        return ParkedCounts(len(self._slots), used, self._capacity)

    def _moves(self, sequence: int, pages: Sequence[Int32Array]) -> list[Moves]:
        of_groups = enumerate(zip(pages, self._slots[sequence], strict=True))
        return [Moves(group, ids, slots, self._number) for group, (ids, slots) in of_groups]


def _allocate(num_bytes: int, *, pinned: bool) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise MemoryError(f"cache.parked_bytes: this host has no {num_bytes} bytes left; set fewer: {error}") from error
