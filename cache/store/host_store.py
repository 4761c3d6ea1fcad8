"""A page store in host memory, with a shelf of slots for each layer group."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.copies import Moves, PageCopies
from tandem.cache.store.disk.disk_pages import DiskCounts
from tandem.cache.store.host_memory import HostMemory
from tandem.cache.store.lanes import Layers, MakeLanes, lanes_of
from tandem.cache.store.page_store import NamedPages, PageNames, StoreCounts
from tandem.cache.store.page_sums import PageSums, words_of
from tandem.cache.store.shelf import Shelf
from tandem.cache.store.stream_lanes import stages_of


class HostStore:
    """A PageStore. On a GPU host its memory is pinned, and copies run on streams of their own."""

    def __init__(
        self,
        pools: Sequence[Tensor],
        num_slots: Sequence[int],
        *,
        layers: Layers | None = None,
        begins: Sequence[int] | None = None,
        verify: bool = False,
        agree: Callable[[int], int] = int,
        grows: bool = False,
        make_lanes: MakeLanes | None = None,
    ) -> None:
        """pools: of each layer group, see PagedKVCache. num_slots: pages that it keeps of each; of all ranks alike.
        layers: the model's layers of each group, in which pages come up one after another; None: they come as a whole.
        begins: the first layer of each stage of that; None: by the size of pages.
        verify: whether fetched pages are compared with what was put, by sums. agree: the sum of what all ranks of the
        worker give it. grows: it keeps nothing before widen(). make_lanes: None is by the pools' device."""
        if len(num_slots) != len(pools) or min(num_slots) < 0:
            raise InvalidArgument(f"num_slots is {tuple(num_slots)}; it must be {len(pools)} counts of at least 0")
        self.page_bytes = [pool[0].nbytes for pool in pools]
        self._memory = HostMemory(num_slots, self.page_bytes, pools[0].device, "cache.host_bytes")
        self._shelves = [Shelf(0 if grows else count) for count in num_slots]
        self._num_slots, self._is_wide = tuple(num_slots), not grows
        words = [words_of(pool) for pool in pools]
        self._sums = [PageSums(*of) for of in zip(words, num_slots, strict=True)] if verify else None
        self._agree = agree
        of_groups = [range(1)] * len(pools) if layers is None else layers
        if begins is None:
            begins = [0] if layers is None else stages_of(layers, self.page_bytes)
        lanes = (make_lanes or lanes_of)(pools, self._memory.shelves, of_groups, begins)
        num_pages = [pool.shape[0] for pool in pools]
        self.copies = PageCopies(lanes, num_pages, num_slots, self.page_bytes, begins)
        self._down = self._up = self._hits = self._bad = 0
        self._filled = [np.zeros(count, np.int64) for count in num_slots]  # how often each slot was

    @property
    def memory(self) -> HostMemory:
        return self._memory

    def put(self, evicted: NamedPages) -> None:
        group = evicted.group
        shelf, page_of, names = self._shelves[group], dict[int, int](), dict[int, bytes]()
        for digest, page in zip(evicted.digests, evicted.pages.tolist(), strict=True):
            slot = shelf.put(digest)
            if slot is not None:
                page_of[slot], names[slot] = page, digest  # a slot that gave way at once gets the later page only
        if not page_of:
            return
        self._memory.await_slot(group, max(page_of))
        pages, slots = (np.fromiter(each, np.int32, len(page_of)) for each in (page_of.values(), page_of))
        self._filled[group][slots] += 1
        sums = None if self._sums is None else self._sums[group]
        self.copies.down([Moves(group, pages, slots)], None if sums is None else lambda: sums.note(pages, slots))
        self._down += len(page_of)
        self._came(group, names)

    def _came(self, group: int, names: dict[int, bytes]) -> None:
        """Copies that fill slots of a group are queued. names: digests by slot."""

    def has(self, digest: bytes) -> bool:
        return any(digest in shelf for shelf in self._shelves)

    def widen(self, num_slots: Sequence[int]) -> None:
        for shelf, count in zip(self._shelves, num_slots, strict=True):
            shelf.num_slots = count
        self._is_wide = tuple(num_slots) == self._num_slots

    @property
    def ready_slots(self) -> tuple[int, ...] | None:
        if self._is_wide:
            return None
        ready = self._memory.pinned
        return ready if ready != tuple(shelf.num_slots for shelf in self._shelves) else None

    def digests(self) -> list[bytes]:
        return [digest for shelf in self._shelves for digest in shelf.digests()]

    def take_forgotten(self) -> list[bytes]:
        return [digest for shelf in self._shelves for digest in shelf.take_forgotten()]

    def find(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        shelf = self._shelves[group]
        return np.array([digest in shelf for digest in digests], np.bool_)

    @contextmanager
    def held(self, wanted: Sequence[PageNames]) -> Iterator[None]:
        for group, digests in wanted:
            self._shelves[group].hold(digests)
        try:
            yield
        finally:
            for group, _ in wanted:
                self._shelves[group].hold(())

    def fetch(self, wanted: Sequence[NamedPages]) -> list[NDArray[np.bool_]]:
        found = [self.find(group, digests) for group, digests, _ in wanted]
        moves = []
        for (group, digests, pages), there in zip(wanted, found, strict=True):
            slots = self._shelves[group].slots(digests[index] for index in np.flatnonzero(there).tolist())
            moves.append(Moves(group, pages[there], np.array(slots, np.int32)))
        if any(one.pages.size for one in moves):
            self.copies.up(moves)
            if self._sums is not None:
                self._refuse_bad(wanted, found, moves, self._sums)
        num_pages = sum(map(int, map(np.count_nonzero, found)))
        self._up += num_pages
        self._hits += num_pages > 0
        return found

    # Nothing is below

    @property
    def has_disk(self) -> bool:
        return False

    def find_below(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.zeros(len(digests), np.bool_)

    def are_lifted(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        return np.zeros(len(digests), np.bool_)

    def lift(self, wanted: Sequence[PageNames]) -> int:
        return 0

    def is_lifted(self, number: int) -> bool:
        return True

    def land(self, number: int) -> int:
        return 0

    def tend(self) -> list[bytes]:
        return []

    @property
    def disk_rate(self) -> float:
        return 0.0

    @property
    def disk_counts(self) -> DiskCounts | None:
        return None

    def close(self) -> None:
        pass

    @property
    def counts(self) -> StoreCounts:
        sizes = list(zip(self._shelves, self.page_bytes, strict=True))
        capacity, used = (
            sum(count * size for count, size in of)
            for of in (
                zip(self._num_slots, self.page_bytes, strict=True),
                ((len(shelf), size) for shelf, size in sizes),
            )
        )
        return StoreCounts(capacity, used, self._down, self._up, self._hits, self._bad)

    def _refuse_bad(
        self,
        wanted: Sequence[NamedPages],
        found: Sequence[NDArray[np.bool_]],
        moves: Sequence[Moves],
        sums: Sequence[PageSums],
    ) -> None:
        """Drops pages that changed on some rank, on each. The ranks meet once where none did."""
        bad = []
        for group, pages, slots, _ in moves:
            self.copies.wait_for(group, pages)
            bad += sums[group].are_bad(pages, slots.tolist())
        if not self._agree(sum(bad)):
            return
        fetched = [
            (of, index, ok) for of, ok in zip(wanted, found, strict=True) for index in np.flatnonzero(ok).tolist()
        ]
        for (of, index, ok), is_bad in zip(fetched, bad, strict=True):
            if self._agree(int(is_bad)):
                self._shelves[of.group].drop(of.digests[index])
                self._bad += 1
                ok[index] = False
