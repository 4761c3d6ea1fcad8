"""A page store in host memory: one buffer, allocated once, with a shelf of slots for each layer group."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.page_store import NamedPages, PageNames, StoreCounts

ALIGNMENT = 64  # bytes; of each shelf
WEIGHT_SEED = 1


class Shelf:
    """Copies of the pages of one group, the least recently used of which give way. A copy stays when it is fetched: a
    page that is evicted again is not copied again."""

    def __init__(self, pool: Tensor, num_slots: int, *, verify: bool) -> None:
        """pool: [num_pages, …], contiguous. verify: whether is_intact() will be asked. The slots come with use()."""
        self.page_bytes = pool[0].nbytes
        self.num_slots = num_slots
        self._pool = _words(pool)
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by digest, least recently used first
        self._next = 0  # the first slot that was never used
        self._free = list[int]()  # those that were, and are not now
        self._held = frozenset[bytes]()
        self._weights = _odd_weights(self._pool) if verify else None
        self._sums = torch.zeros(num_slots if verify else 0, dtype=torch.int64, device=pool.device)

    def use(self, memory: Tensor) -> None:
        """memory: uint8 [num_slots · page_bytes]."""
        self._memory = memory.view(self._pool.dtype).view(self.num_slots, self._pool.shape[1])

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    def hold(self, digests: Sequence[bytes]) -> None:
        """Until the next call put() gives none of these up. They become the last used, the first of them last."""
        known = [digest for digest in digests if digest in self._slots]
        for digest in reversed(known):
            self._slots.move_to_end(digest)
        self._held = frozenset(known)

    def put(self, digest: bytes, page: int) -> bool:
        """Whether the page was copied: a known one is not, and none where nothing may give way."""
        if digest in self._slots:
            self._slots.move_to_end(digest)
            return False
        if not self._free and self._next < self.num_slots:
            self._free.append(self._next)
            self._next += 1
        if not self._free:
            oldest = next(iter(self._slots), None)
            if oldest is None or oldest in self._held:
                return False
            self.drop(oldest)
        self._slots[digest] = slot = self._free.pop()
        self._memory[slot].copy_(self._pool[page], non_blocking=True)
        if self._weights is not None:
            self._sums[slot] = self._sum(page)
        return True

    def fetch(self, digest: bytes, page: int) -> None:
        self._pool[page].copy_(self._memory[self._slots[digest]], non_blocking=True)

    def is_intact(self, digest: bytes, page: int) -> bool:
        """Whether a page that was fetched is as it was when it was put. Waits for the device."""
        return bool(self._sum(page) == self._sums[self._slots[digest]])

    def drop(self, digest: bytes) -> None:
        self._free.append(self._slots.pop(digest))

    def _sum(self, page: int) -> Tensor:
        """int64 []: Σ word · odd weight modulo 2⁶⁴, which one changed word always changes."""
        assert self._weights is not None, "the shelf was made to verify"
        return (self._pool[page].long() * self._weights).sum()


class HostStore:
    """A PageStore. On a GPU host its memory is pinned, and copies are queued on the current stream."""

    def __init__(
        self,
        pools: Sequence[Tensor],
        num_slots: Sequence[int],
        *,
        verify: bool = False,
        agree: Callable[[int], int] = int,
    ) -> None:
        """pools: of each layer group, see PagedKVCache. num_slots: pages that it keeps of each; of all ranks alike.
        verify: whether fetched pages are compared with what was put, by sums. agree: the sum of what all ranks of the
        worker give it."""
        if len(num_slots) != len(pools) or min(num_slots) < 0:
            raise InvalidArgument(f"num_slots is {tuple(num_slots)}; {len(pools)} counts of at least 0 are accepted")
        self._verify, self._agree, self._device = verify, agree, pools[0].device
        sizes = [count * pool[0].nbytes for pool, count in zip(pools, num_slots, strict=True)]
        ends = list(accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))
        self.memory = _allocate(ends[-1], pinned=self._device.type == "cuda")
        self._shelves = [Shelf(*of, verify=verify) for of in zip(pools, num_slots, strict=True)]
        for shelf, begin, size in zip(self._shelves, [0, *ends], sizes, strict=False):
            shelf.use(self.memory[begin : begin + size])
        self._copied: torch.cuda.Event | None = None
        self._down = self._up = self._hits = self._bad = 0

    def put(self, evicted: NamedPages) -> None:
        shelf, before = self._shelves[evicted.group], self._down
        for digest, page in zip(evicted.digests, evicted.pages.tolist(), strict=True):
            self._down += shelf.put(digest, page)
        if self._down > before:
            self._mark_copies()

    def has(self, digest: bytes) -> bool:
        return any(digest in shelf for shelf in self._shelves)

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
        found = []
        for group, digests, pages in wanted:
            shelf = self._shelves[group]
            found.append(self.find(group, digests))
            for index in np.flatnonzero(found[-1]).tolist():
                shelf.fetch(digests[index], int(pages[index]))
        if self._verify:
            self._refuse_bad(wanted, found)
        num_pages = sum(map(int, map(np.count_nonzero, found)))
        self._up += num_pages
        self._hits += num_pages > 0
        if num_pages:
            self._mark_copies()
        return found

    def settle(self) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            copied.synchronize()

    @property
    def counts(self) -> StoreCounts:
        used = sum(shelf.num_used * shelf.page_bytes for shelf in self._shelves)
        return StoreCounts(self.memory.numel(), used, self._down, self._up, self._hits, self._bad)

    def _mark_copies(self) -> None:
        """Makes settle() wait for all copies that are queued."""
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))

    def _refuse_bad(self, wanted: Sequence[NamedPages], found: Sequence[NDArray[np.bool_]]) -> None:
        """Drops pages that changed on some rank, on each. The ranks meet once where none did."""
        fetched = [
            (of, index, ok) for of, ok in zip(wanted, found, strict=True) for index in np.flatnonzero(ok).tolist()
        ]
        bad = [
            not self._shelves[of.group].is_intact(of.digests[index], int(of.pages[index])) for of, index, _ in fetched
        ]
        if not fetched or not self._agree(sum(bad)):
            return
        for (of, index, ok), is_bad in zip(fetched, bad, strict=True):
            if self._agree(int(is_bad)):
                self._shelves[of.group].drop(of.digests[index])
                self._bad += 1
                ok[index] = False


def _allocate(num_bytes: int, *, pinned: bool) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise MemoryError(
            f"cache.host_bytes: this host has no {num_bytes} bytes left; fewer are accepted: {error}"
        ) from error


def _words(pool: Tensor) -> Tensor:
    """[num_pages, n]: int64 where a page is some of these, else bytes."""
    pages = pool.view(torch.uint8).view(pool.shape[0], -1)
    return pages.view(torch.int64) if pages.shape[1] % 8 == 0 else pages


def _odd_weights(words: Tensor) -> Tensor:
    """int64 [n], for words [num_pages, n]; the same each time."""
    generator = torch.Generator().manual_seed(WEIGHT_SEED)
    return (torch.randint(-(1 << 62), 1 << 62, words.shape[1:], generator=generator) | 1).to(words.device)
