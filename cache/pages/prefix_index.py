"""Pages that hold the KV of known token prefixes, for other sequences to share."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.pages.prefix_log import PrefixChanges, PrefixKeys, PrefixLog
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.prefix_chain import KEY_BYTES, digest_chain
from tandem.cache.plan.spans import ALL, Span
from tandem.cache.store.page_store import NamedPages, PageStore

NO_PAGE = -1
MOST_STORED = 1 << 16  # keys that the log of pages in the store has room for, in addition to pages' keys


Find = Callable[[int], NDArray[np.bool_]]
"""Finds which pages of a chain of digests are stored, for a layer group."""


class Lacking(NamedTuple):
    """The pages of a prefix that a store has and the index lacks. longer: the entries by which they lengthen the
    prefix. indexes: int64 [n] for each group, their places in the chain of digests. held: int32 [m] for each group, the
    prefix's pages that the index has."""

    longer: int
    indexes: list[Int64Array]
    held: list[Int32Array]


class IndexedPages:
    """The pages of one layer group that the index holds a reference to. All arrays are by page."""

    def __init__(self, allocator: PageAllocator, span: Span, together: int) -> None:
        self.allocator = allocator
        self.span = span
        self.together = together
        self.indexed = np.zeros(allocator.num_pages, np.bool_)
        self.entries = np.zeros(allocator.num_pages, np.int64)
        self.stamps = np.zeros(allocator.num_pages, np.int64)
        self.generations = np.zeros(allocator.num_pages, np.int64)  # how often the index has dropped a page
        self.goes_alone = span.drops_past or span.last  # a page whose entry may stay without it
        self.num_dropped = 0

    def unused(self) -> NDArray[np.bool_]:
        """Returns the pages that no sequence uses, bool [num_pages]."""
        return self.indexed & (self.allocator.references == 1)

    def drop(self, pages: Int32Array) -> None:
        self.indexed[pages] = False
        self.generations[pages] += 1
        self.num_dropped += pages.size
        self.allocator.release(pages)


class PrefixIndex:
    """Full pages by the digest of their salt and of all tokens up to their end: see digest_chain.

    An entry stands for page_size positions. It names a page in each layer group, or none where a group with a window
    has dropped it, or where a group with states has no snapshot. A page that covers several entries is named by the
    last of them. The index holds one reference to each, so a page that nobody else uses has exactly one. A prefix of n
    pages is found where each group has the pages that a query after it needs: all of them, the last of a window, or
    the snapshot after page n. So n is a multiple of what the coarsest page covers. A border divides the pages of an
    encoder from those after: a group has pages on one side of it, and a prefix has all of the encoder's.

    A page is stamped when it is matched or published, a page later than those that follow it in its prefix: the least
    recently used page is a leaf, or one whose followers are in use. An entry goes with its page in a group that keeps
    all; a group with a window or with snapshots drops its pages alone. Evicted pages go to the store, if there is one.
    """

    def __init__(
        self,
        allocators: tuple[PageAllocator, ...],
        page_size: int,
        spans: Sequence[Span] | None = None,
        together: Sequence[int] | None = None,
    ) -> None:
        """spans: what each layer group keeps; None: all keep all. together: how many entries a page of each covers;
        None: one."""
        spans = [ALL] * len(allocators) if spans is None else spans
        together = [1] * len(allocators) if together is None else together
        self._groups = [IndexedPages(*of) for of in zip(allocators, spans, together, strict=True)]
        # After so many entries a group has a page without which no longer prefix is found; 0: no group has.
        self._needed_each = min((of.together for of in self._groups if not of.goes_alone), default=0)
        self._page_size = page_size
        most = sum(allocator.num_pages for allocator in allocators)  # each entry has a page somewhere
        self._entries: dict[bytes, int] = {}  # digest → entry
        self._digests: dict[int, bytes] = {}
        self._free = list(range(most - 1, -1, -1))
        self._pages = np.full((len(allocators), most), NO_PAGE, np.int32)  # by entry
        self._keys = np.zeros(most, np.uint64)  # of the digests, by entry
        self._log = PrefixLog(max_keys=most)  # a reader that missed more is told all
        self._clock = 0
        self.store: PageStore | None = None
        """The store that takes evicted pages."""
        self._reach = PrefixLog(max_keys=0)  # of keys that are here or in the store; where there is one

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def indexed(self) -> tuple[NDArray[np.bool_], ...]:
        """bool [num_pages] of each group: whether the index holds a reference to a page; to be read only."""
        return tuple(group.indexed for group in self._groups)

    @property
    def generations(self) -> tuple[Int64Array, ...]:
        """int64 [num_pages] of each group: how often the index has dropped a page; to be read only."""
        return tuple(group.generations for group in self._groups)

    @property
    def num_dropped(self) -> tuple[int, ...]:
        """Pages of each group that the index has dropped so far."""
        return tuple(group.num_dropped for group in self._groups)

    @property
    def num_evictable(self) -> tuple[int, ...]:
        """Pages of each group that no sequence uses."""
        return tuple(int(np.count_nonzero(group.unused())) for group in self._groups)

    def count_evictable(self, group: int, gone: Int32Array) -> int:
        """Pages of a group that no sequence uses once the references in `gone` (int32 [n]) are released."""
        pages, indexed = self._groups[group], self._groups[group].indexed
        ids, times = np.unique(gone, return_counts=True)
        left = pages.allocator.references[ids] - times
        return int(np.count_nonzero(pages.unused())) + int(np.count_nonzero(indexed[ids] & (left == 1)))

    def keep_evicted(self, store: PageStore) -> None:
        """Gives evicted pages to the store from now on. The store is empty."""
        self.store = store
        self._reach = PrefixLog(max_keys=self._keys.size + MOST_STORED)
        self._reach.add(self._all_keys())

    @property
    def position(self) -> int:
        """Grows whenever an entry comes or goes, here or in the store. Any thread may read it."""
        return self._log.position + self._reach.position

    def changes(self, since: int | None, *, stored: bool = False) -> PrefixChanges:
        """Returns the keys that have come and gone since the `position` of an earlier answer; all keys for None, or
        where the log does not reach back so far. stored: keys of the store count, too, if there is one."""
        log = self._reach if stored else self._log
        found = None if since is None else log.since(since)
        if found is not None:
            return PrefixChanges(log.position, False, *found)
        keys = self._all_keys()
        if stored:
            others = _keys(self.store.digests()) if self.store is not None else keys[:0]
            keys = np.union1d(keys, others) if self.store is not None else keys[:0]
        return PrefixChanges(log.position, True, keys[:0], keys)

    def _all_keys(self) -> PrefixKeys:
        return self._keys[np.fromiter(self._digests, np.int64, len(self._digests))]

    def digests(self, token_ids: Int64Array, max_pages: int, salt: bytes = b"") -> list[bytes]:
        """Returns the digests of the first pages of token_ids, at most max_pages, up to the first one without which no
        longer prefix is found."""
        each = self._needed_each
        found = list[bytes]()
        for digest in digest_chain(token_ids, self._page_size, max_pages, salt):
            if each and (len(found) + 1) % each == 0 and not self._knows(digest):
                break
            found.append(digest)
        return found

    def match(self, digests: Sequence[bytes], border: int = 0) -> tuple[int, tuple[Int32Array, ...]]:
        """Returns the number of pages of the longest known prefix, and for each group the pages that a query after
        it needs. digests() gives the names. The pages needed are the prefix's last on the group's side of the
        border. The caller retains them at once. border: the number of pages of an encoder, whose prompt is in the
        salt."""
        pages = _known(self._pages_of(digests))
        length, begins = self._longest(pages, border)
        ends = [self._end(group, length, border) for group in self._groups]
        matched = tuple(
            row[begin:end][group.together - 1 :: group.together]
            for group, row, begin, end in zip(self._groups, pages, begins, ends, strict=True)
        )
        self._touch(matched, length, border)
        return length, matched

    def lacking(self, digests: Sequence[bytes], store: PageStore, border: int = 0) -> Lacking | None:
        """Returns what to fetch for a longer prefix than match() would find, or None where the store has nothing for
        it."""
        return self._lacking(digests, lambda group: store.find(group, digests), border)

    def _lacking(self, digests: Sequence[bytes], find: Find, border: int) -> Lacking | None:
        pages = self._pages_of(digests)
        stored = np.array([find(group) for group in range(len(self._groups))]) & (pages == NO_PAGE)
        length, begins = self._longest(_known(np.where(stored, np.int32(0), pages)), border)
        known = self._longest(_known(pages), border)[0]
        if length <= known:
            return None
        indexes, held = [], []
        for group, row, begin in zip(self._groups, pages, begins, strict=True):
            needed = np.arange(begin, self._end(group, length, border))[group.together - 1 :: group.together]
            indexes.append(needed[row[needed] == NO_PAGE])
            held.append(row[needed][row[needed] != NO_PAGE])
        return Lacking(length - known, indexes, held)

    def below(self, digests: Sequence[bytes], store: PageStore, border: int = 0) -> Lacking | None:
        """Returns what lacking() would return if the store had the pages of the disk below it, or None where these make
        no prefix longer. longer: compared with the store alone."""
        deep = self._lacking(digests, lambda of: store.find(of, digests) | store.find_below(of, digests), border)
        if deep is None:
            return None
        above = self.lacking(digests, store, border)
        longer = deep.longer - (0 if above is None else above.longer)
        return deep._replace(longer=longer) if longer else None

    def num_lifted(self, digests: Sequence[bytes], store: PageStore, lacking: Lacking, border: int = 0) -> int:
        """Returns by how many entries `lacking` is longer because of pages that came from the disk."""
        names = [[digests[index] for index in at.tolist()] for at in lacking.indexes]
        if not any(store.are_lifted(group, of).any() for group, of in enumerate(names)):
            return 0
        without = self._lacking(
            digests, lambda group: store.find(group, digests) & ~store.are_lifted(group, digests), border
        )
        return lacking.longer - (0 if without is None else without.longer)

    def tend(self) -> None:
        """See PageStore.tend."""
        if self.store is not None and self.store.has_disk:
            adopted = [digest for digest in self.store.tend() if digest not in self._entries]
            self._reach.add(_keys(adopted))
            self.forget_stored()

    def publish(self, token_ids: Int64Array, pages: tuple[Int32Array, ...], salt: bytes = b"", border: int = 0) -> None:
        """Indexes pages as the KV of the first n pages of token_ids, which hold so many; known ones stay.

        pages: for each group int32, all n pages, or the last ones that a group with a window still has; with a border
        (see match) only pages on the group's side. A group with states gives all n, NO_PAGE where it has no snapshot.
        """
        num_pages = token_ids.size // self._page_size
        if num_pages < border:
            return
        digests = list(digest_chain(token_ids, self._page_size, num_pages, salt))
        given = np.full((len(self._groups), num_pages), NO_PAGE, np.int32)
        for group, row, ids in zip(self._groups, given, pages, strict=True):
            full = self._end(group, num_pages, border) // group.together
            row[: full * group.together][group.together - 1 :: group.together][full - ids.size :] = ids
        self.add(digests, given)

    def add(self, digests: Sequence[bytes], given: Int32Array) -> None:
        """Indexes full pages, int32 [groups, n], by n digests of a chain; NO_PAGE where there is none. Known ones
        stay."""
        known = self._entries_of(digests)
        new = (given != NO_PAGE) & ((known == NO_PAGE) | (self._pages[:, known] == NO_PAGE))
        for group, row, mask in zip(self._groups, given, new, strict=True):
            taken = np.flatnonzero(mask & group.indexed[row])
            if taken.size:
                raise InvalidArgument(
                    f"token_ids differ from those that page {taken[0]} of the sequence was published for"
                )
        added = []
        for index in np.flatnonzero(new.any(0) & (known == NO_PAGE)).tolist():
            known[index] = entry = self._free.pop()
            self._entries[digests[index]], self._digests[entry] = entry, digests[index]
            added.append(entry)
        self._keys[added] = keys = _keys([self._digests[entry] for entry in added])
        self._log.add(keys)
        if self.store is not None and added:
            new_here = [not self.store.has(self._digests[entry]) for entry in added]
            self._reach.add(keys[np.array(new_here)])
        for number, (group, row, mask) in enumerate(zip(self._groups, given, new, strict=True)):
            ids, entries = row[mask], known[mask]
            group.allocator.retain(ids)
            group.indexed[ids], group.entries[ids] = True, entries
            self._pages[number, entries] = ids
        held = np.where(known == NO_PAGE, np.int32(NO_PAGE), self._pages[:, known])
        self._touch(tuple(np.where(given == NO_PAGE, given, held)), len(digests))

    @staticmethod
    def _end(group: IndexedPages, length: int, border: int) -> int:
        """Returns the position where a group's pages end in a prefix of `length` positions."""
        return min(length, border) if group.span.given else length

    def evict(self, group: int, count: int) -> None:
        """Drops the `count` least recently used pages of a group that no sequence uses, at least 1; there must be as
        many."""
        pages = self._groups[group]
        unused = np.flatnonzero(pages.unused()).astype(np.int32)
        oldest = np.argpartition(pages.stamps[unused], count - 1)[:count]  # steps wait for it: sorting all takes longer
        entries = pages.entries[unused[oldest]]
        if pages.goes_alone:
            self._put_down(group, unused[oldest])
            self._pages[group, entries] = NO_PAGE
            pages.drop(unused[oldest])
            entries = entries[(self._pages[:, entries] == NO_PAGE).all(0)]
        for number, row in enumerate(self._pages[:, entries]):
            self._put_down(number, row[row != NO_PAGE])
        self._drop(entries)

    def clear(self) -> None:
        """Drops all entries; pages that sequences use stay theirs."""
        self._drop(np.fromiter(self._digests, np.int64, len(self._digests)))

    def _entries_of(self, digests: Sequence[bytes]) -> Int64Array:
        """Returns the digests' entries, int64 [n]; NO_PAGE where there is none."""
        return np.array([self._entries.get(digest, NO_PAGE) for digest in digests], np.int64)

    def _pages_of(self, digests: Sequence[bytes]) -> Int32Array:
        """Returns the digests' pages, int32 [groups, n]; NO_PAGE where there is none."""
        entries = self._entries_of(digests)
        return np.where(entries == NO_PAGE, np.int32(NO_PAGE), self._pages[:, entries])

    def _knows(self, digest: bytes) -> bool:
        return digest in self._entries or (self.store is not None and self.store.has(digest))

    def _put_down(self, group: int, pages: Int32Array) -> None:
        """Gives the store pages of a group that the index is about to drop."""
        if self.store is None or not pages.size:
            return
        of = self._groups[group]
        pages = pages[np.argsort(of.stamps[pages], kind="stable")]
        self.store.put(NamedPages(group, [self._digests[entry] for entry in of.entries[pages].tolist()], pages))

    def forget_stored(self) -> None:
        """Reports pages as gone that the store has forgotten and the pools do not hold."""
        forgotten = [] if self.store is None else self.store.take_forgotten()
        self._reach.remove(_keys(list(dict.fromkeys(one for one in forgotten if not self._knows(one)))))

    def _longest(self, pages: Int32Array, border: int) -> tuple[int, list[int]]:
        """The most of n pages (int32 [groups, n], NO_PAGE where there is none) after which a query finds all that it
        needs, and the first page index that it needs in each group."""
        ends = np.arange(pages.shape[1] + 1)
        found = (ends >= border) | (ends == 0)
        firsts = []
        for group, row in zip(self._groups, pages, strict=True):
            first = group.span.first_needed(ends * self._page_size) // self._page_size
            lasts = np.minimum(ends, border) if group.span.given else ends
            first = np.minimum(first if group.span.given else np.maximum(first, border), ends)
            named = ends[1:] % group.together == 0  # the last entries of pages
            missing = np.concatenate(([0], np.cumsum((row == NO_PAGE) & named)))
            found &= (missing[lasts] == missing[first]) & (ends % group.together == 0)
            firsts.append(first)
        length = int(np.flatnonzero(found)[-1])
        return length, [int(first[length]) for first in firsts]

    def _drop(self, entries: Int64Array) -> None:
        gone = [self._digests.pop(entry) for entry in entries.tolist()]
        for digest in gone:
            del self._entries[digest]
        if self.store is not None:
            self.forget_stored()
            self._reach.remove(_keys([digest for digest in gone if not self.store.has(digest)]))
        self._free += entries.tolist()
        self._log.remove(self._keys[entries])
        for group, pages in zip(self._groups, self._pages, strict=True):
            group.drop(pages[entries][pages[entries] != NO_PAGE])
            pages[entries] = NO_PAGE

    def _touch(self, pages: tuple[Int32Array, ...], num_pages: int, border: int | None = None) -> None:
        """pages: for each group the last of num_pages, or, with a border, the last on its side; NO_PAGE where there
        is none."""
        self._clock += num_pages
        for group, ids in zip(self._groups, pages, strict=True):
            end = num_pages if border is None else self._end(group, num_pages, border)
            stamps = self._clock - np.arange(end - ids.size, end)
            group.stamps[ids[ids != NO_PAGE]] = stamps[ids != NO_PAGE]


def _known(pages: Int32Array) -> Int32Array:
    """pages [groups, n] without the last ones that are NO_PAGE in all groups: what a chunk begins after is needed by
    nobody, known or not."""
    return pages[:, : np.flatnonzero((pages != NO_PAGE).any(0)).max(initial=-1) + 1]


def _keys(digests: list[bytes]) -> PrefixKeys:
    return np.frombuffer(b"".join([digest[:KEY_BYTES] for digest in digests]), "<u8").astype(np.uint64)
