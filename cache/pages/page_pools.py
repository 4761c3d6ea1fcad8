"""The pages of all layer groups, and the prefix index that gives way when they run out."""

from collections.abc import Sequence
from operator import mul

import numpy as np

from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.pages.page_users import PageUsers
from tandem.cache.pages.prefix_index import NO_PAGE, PrefixIndex
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.errors import OutOfPages
from tandem.cache.plan.spans import Span
from tandem.cache.store.copies import NO_COPIES
from tandem.cache.store.page_store import NamedPages, PageStore

PageIds = tuple[Int32Array, ...]
"""For each layer group int32 [n], its pages; n may differ between groups."""


class PagePools:
    """An allocator for each layer group. A call takes pages from all groups or from none, and no page that is owed:
    see PageUsers."""

    def __init__(
        self,
        num_pages: tuple[int, ...],
        page_size: int,
        spans: Sequence[Span] | None = None,
        together: Sequence[int] | None = None,
    ) -> None:
        """spans: what each layer group keeps; None: all keep all. together: see PrefixIndex."""
        self.allocators = tuple(PageAllocator(count) for count in num_pages)
        self.none: PageIds = tuple(np.empty(0, np.int32) for _ in num_pages)
        self.prefixes = PrefixIndex(self.allocators, page_size, spans, together)
        self.num_fetched = 0
        """An upper bound on the entries by which the last match is longer than it would be without a store."""
        self.num_lifted = 0
        """The part of num_fetched that is due to pages from a disk."""
        self.num_skipped = 0
        """Prompts whose pages in the store would have cost more than computing them."""
        self.num_unread = 0
        """The number of times that below() found a disk too slow."""
        self._page_size = page_size
        self.copies = NO_COPIES
        """The copies between the pools and the stores of evicted pages and of parked sequences."""
        drops = [span.drops_past for span in spans] if spans else [False] * len(num_pages)
        indexed = [
            pages if drops_past else None for pages, drops_past in zip(self.prefixes.indexed, drops, strict=True)
        ]
        self.users = tuple(map(PageUsers, self.allocators, indexed))

    @property
    def num_pages(self) -> tuple[int, ...]:
        """The number of pages of each group."""
        return tuple(allocator.num_pages for allocator in self.allocators)

    @property
    def num_free(self) -> tuple[int, ...]:
        """Pages that allocate() can give of each group, those included that only the prefix index uses, without those
        that are owed."""
        kinds = zip(self.allocators, self.prefixes.num_evictable, self.users, strict=True)
        return tuple(allocator.num_free + evictable - users.num_owed for allocator, evictable, users in kinds)

    @property
    def num_draining(self) -> tuple[int, ...]:
        return tuple(allocator.num_draining for allocator in self.allocators)

    def match(
        self, token_ids: Int64Array, max_pages: int, salt: bytes, border: int, most_bytes: int | None = None
    ) -> tuple[int, PageIds]:
        """Returns the longest known prefix, see PrefixIndex.match. Pages in a store are fetched and indexed first,
        if they take at most most_bytes for each position that they add to the prefix."""
        digests = self.prefixes.digests(token_ids, max_pages, salt)
        self.num_fetched = self.num_lifted = 0
        if self.prefixes.store is not None:
            self._bring_up(digests, self.prefixes.store, border, most_bytes)
        return self.prefixes.match(digests, border)

    def below(
        self, token_ids: Int64Array, max_pages: int, salt: bytes, border: int, most_bytes: int | None
    ) -> list[tuple[int, list[bytes]]]:
        """Returns the pages to PageStore.lift() so that match() then finds a longer prefix. Empty where a disk has
        none, or where it would read more than most_bytes for each position."""
        store = self.prefixes.store
        if store is None or not store.has_disk:
            return []
        digests = self.prefixes.digests(token_ids, max_pages, salt)
        found = self.prefixes.below(digests, store, border)
        if found is None:
            return []
        names = [(group, [digests[i] for i in at.tolist()]) for group, at in enumerate(found.indexes)]
        counts = [np.count_nonzero(~store.find(*of)) for of in names]
        num_bytes = sum(map(mul, counts, store.page_bytes))
        if most_bytes is not None and num_bytes > most_bytes * found.longer * self._page_size:
            self.num_unread += 1
            return []
        return names

    def allocate(self, counts: Sequence[int]) -> PageIds:
        """counts[i] pages of group i; evicts prefixes where free ones do not suffice. OutOfPages changes nothing."""
        return self.exchange(self.none, counts)

    def take_spare(self, group: int) -> int | None:
        """A page of a group that owes none, for what may be evicted again; None where no page is free, and the prefix
        index has none to evict."""
        allocator = self.allocators[group]
        if not allocator.num_free:
            if not self.prefixes.num_evictable[group]:
                return None
            self.prefixes.evict(group, 1)
        return int(allocator.allocate(1)[0])

    def exchange(self, gone: PageIds, counts: Sequence[int]) -> PageIds:
        """Releases `gone`, then allocates. OutOfPages changes nothing: `gone` is still the caller's."""
        if not any(counts) and not any(ids.size for ids in gone):
            return self.none
        short = any(
            count > users.allocator.num_free - users.num_owed for users, count in zip(self.users, counts, strict=True)
        )
        if short:
            self._check_room(gone, counts)
        self.release(gone)
        if short:
            self._make_room(counts)
        return tuple(allocator.allocate(count) for allocator, count in zip(self.allocators, counts, strict=True))

    def _bring_up(self, digests: Sequence[bytes], store: PageStore, border: int, most_bytes: int | None) -> None:
        """Takes pages from the store into the prefix index, where that finds a longer prefix. They take no room,
        because they can be evicted. Does nothing where there are too few pages."""
        lacking = self.prefixes.lacking(digests, store, border)
        if lacking is None:
            return
        num_bytes = sum(at.size * size for at, size in zip(lacking.indexes, store.page_bytes, strict=True))
        if most_bytes is not None and num_bytes > most_bytes * lacking.longer * self._page_size:
            self.num_skipped += 1
            return
        names = [(group, [digests[i] for i in at.tolist()]) for group, at in enumerate(lacking.indexes)]
        own = list(zip(self.allocators, lacking.held, strict=True))
        for allocator, ids in own:
            allocator.retain(ids)  # what is evicted now is not of this prefix
        try:
            with store.held(names):
                fresh = self.allocate([at.size for at in lacking.indexes])
        except OutOfPages:
            return
        finally:
            for allocator, ids in own:
                allocator.release(ids)
        wanted = [NamedPages(*of, ids) for of, ids in zip(names, fresh, strict=True)]
        num_lifted = self.prefixes.num_lifted(digests, store, lacking, border)
        given = np.full((len(fresh), len(digests)), NO_PAGE, np.int32)
        for row, at, ids, good in zip(given, lacking.indexes, fresh, store.fetch(wanted), strict=True):
            row[at[good]] = ids[good]
        self.prefixes.add(digests, given)
        self.release(fresh)
        self.num_fetched, self.num_lifted = lacking.longer, num_lifted

    def _check_room(self, gone: PageIds, counts: Sequence[int]) -> None:
        """OutOfPages unless eviction can make room for counts[i] pages of group i once `gone` is released."""
        for group, (users, ids, count) in enumerate(zip(self.users, gone, counts, strict=True)):
            owed = users.num_owed - users.num_settled(ids)
            free = users.allocator.num_free + users.allocator.count_freed(ids) - owed
            if count > free and count > (free := free + self.prefixes.count_evictable(group, ids)):
                raise OutOfPages(count, free)

    def _make_room(self, counts: Sequence[int]) -> None:
        """Evicts prefixes until there is room for counts[i] pages of group i. An entry may have a page in every
        group."""
        for group, (allocator, count) in enumerate(zip(self.allocators, counts, strict=True)):
            if count > allocator.num_free:
                self.prefixes.evict(group, count - allocator.num_free)

    def retain(self, pages: PageIds) -> None:
        """One sequence more uses `pages`. Where a group drops pages, it takes as much room as new ones would:
        OutOfPages changes nothing."""
        owing = zip(self.users, pages, strict=True)
        self._check_room(self.none, [ids.size if users.owes else 0 for users, ids in owing])
        for users, ids in zip(self.users, pages, strict=True):
            users.retain(ids)

    def release(self, pages: PageIds) -> None:
        """Ends one sequence's use of `pages`."""
        for users, ids in zip(self.users, pages, strict=True):
            users.release(ids)

    def hold(self, pages: PageIds) -> None:
        for allocator, ids in zip(self.allocators, pages, strict=True):
            allocator.hold(ids)

    def settle(self, pages: PageIds) -> None:
        for allocator, ids in zip(self.allocators, pages, strict=True):
            allocator.settle(ids)
