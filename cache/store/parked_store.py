"""Parked sequences in host memory: they gave up their pages to others, and continue later."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.copies import Moves, PageCopies
from tandem.cache.store.host_memory import HostMemory
from tandem.cache.store.lanes import MakeLanes, lanes_of


class ParkedCounts(NamedTuple):
    """Sequences in a store, the bytes that they take, and its capacity in bytes: on a GPU host, of slots that are
    already pinned."""

    sequences: int = 0
    used: int = 0
    capacity: int = 0


class ParkedStore:
    """Slots for pages of each layer group, in host memory that a thread pins on a GPU host. A sequence keeps its slots
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
        self._memory = HostMemory(num_slots, self._page_bytes, pools[0].device, "cache.parked_bytes")
        self._taken = [np.zeros(count, np.bool_) for count in num_slots]
        self._slots: dict[int, list[Int32Array]] = {}  # by sequence, of each group
        shelves = self._memory.shelves
        if copies is None:
            lanes = (make_lanes or lanes_of)(pools, shelves, [range(1)] * len(pools), [0])
            num_pages = [pool.shape[0] for pool in pools]
            self.copies, self._number = PageCopies(lanes, num_pages, num_slots, self._page_bytes), 0
        else:
            self.copies, self._number = copies, copies.extend(shelves)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._slots

    @property
    def memory(self) -> HostMemory:
        return self._memory

    def has_room(self, counts: Sequence[int]) -> bool:
        """Returns whether there are slots for this many pages of each group, pinned or not. It follows from the calls
        before, so ranks and replays agree on it."""
        return self._are_free(counts, [taken.size for taken in self._taken])

    def fits(self, counts: Sequence[int]) -> bool:
        """Returns whether put() has room for this many pages of each group without waiting: in slots that are
        already pinned. The answer depends on time."""
        return self._are_free(counts, self._memory.pinned)

    def put(self, sequence: int, pages: Sequence[Int32Array]) -> None:
        """Copies a sequence's pages, int32 [n] of each group; see has_room(). The next write to them waits for that.
        Waits until the slots are pinned; raises MemoryError if the host could not pin them."""
        slots = [
            np.flatnonzero(~taken)[: ids.size].astype(np.int32) for taken, ids in zip(self._taken, pages, strict=True)
        ]
        for group, own in enumerate(slots):
            if own.size:
                self._memory.await_slot(group, int(own[-1]))
        for taken, own in zip(self._taken, slots, strict=True):
            taken[own] = True
        self._slots[sequence] = slots
        self.copies.down(self._moves(sequence, pages))

    def fetch(self, sequence: int, pages: Sequence[Int32Array]) -> None:
        """Copies a sequence back into as many pages of each group, in the same order. The next read or
        write of them waits for that."""
        self.copies.up(self._moves(sequence, pages))

    def drop(self, sequence: int) -> None:
        """Frees a sequence's slots. The next copies into them wait for the sequence's copies. Idempotent."""
        for taken, own in zip(self._taken, self._slots.pop(sequence, ()), strict=False):
            taken[own] = False

    @property
    def bytes_in_copies(self) -> int:
        """The bytes that are being copied from and to its memory."""
        return self.copies.num_bytes(self._number)

    @property
    def counts(self) -> ParkedCounts:
        taken = [int(np.count_nonzero(one)) for one in self._taken]
        used, capacity = (
            sum(count * size for count, size in zip(counts, self._page_bytes, strict=True))
            for counts in (taken, self._memory.pinned)
        )
        return ParkedCounts(len(self._slots), used, capacity)

    def _are_free(self, counts: Sequence[int], begins: Sequence[int]) -> bool:
        """Returns whether so many slots are free among the first begins[i] of each group."""
        of_groups = zip(counts, begins, self._taken, strict=True)
        return all(count + np.count_nonzero(taken[:begin]) <= begin for count, begin, taken in of_groups)

    def _moves(self, sequence: int, pages: Sequence[Int32Array]) -> list[Moves]:
        of_groups = enumerate(zip(pages, self._slots[sequence], strict=True))
        return [Moves(group, ids, slots, self._number) for group, (ids, slots) in of_groups]
