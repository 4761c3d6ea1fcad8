"""Pages that hold the KV of known token prefixes, for other sequences to share."""

import numpy as np

from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.pages.prefix_log import PrefixChanges, PrefixKeys, PrefixLog
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.prefix_chain import KEY_BYTES, digest_chain


class PrefixIndex:
    """Full pages by the digest of their salt and of all tokens up to their end: see digest_chain.

    An entry is one page in each layer group and holds one reference to each, so a page that nobody but the index
    uses has exactly one. Groups share an entry's fate; their counts are equal, and those of group 0 are read.
    An entry is stamped when it is matched or published, a page later than those that follow it in its prefix: the
    least recently used entry is a leaf, or one whose followers are in use.
    """

    def __init__(self, allocators: tuple[PageAllocator, ...], page_size: int) -> None:
        self._allocators = allocators
        self._page_size = page_size
        num_pages = allocators[0].num_pages
        self._entries: dict[bytes, int] = {}  # digest → page of group 0
        self._digests: dict[int, bytes] = {}
        self._pages = np.zeros((len(allocators), num_pages), np.int32)  # by page of group 0
        self._keys = np.zeros(num_pages, np.uint64)  # of the digests, by page of group 0
        self._log = PrefixLog(max_keys=num_pages)  # a reader that missed more is told all
        self._indexed = np.zeros(num_pages, np.bool_)
        self._stamps = np.zeros(num_pages, np.int64)
        self._clock = 0

    def __len__(self) -> int:
        """Entries, which are pages of each group."""
        return len(self._entries)

    @property
    def num_evictable(self) -> int:
        """Entries that no sequence uses."""
        return int(np.count_nonzero(self._unused()))

    @property
    def position(self) -> int:
        """Grows whenever an entry comes or goes. Any thread may read it."""
        return self._log.position

    def changes(self, since: int | None) -> PrefixChanges:
        """Keys that have come and gone since the `position` of an earlier report; all of them for None, or where the
        log does not reach back so far."""
        found = None if since is None else self._log.since(since)
        if found is None:
            return PrefixChanges(self.position, True, self._keys[:0], self._keys[self._indexed])
        return PrefixChanges(self.position, False, *found)

    def match(self, token_ids: Int64Array, max_pages: int, salt: bytes = b"") -> tuple[Int32Array, ...]:
        """Per group the pages of the longest known prefix, at most max_pages; the caller retains them at once."""
        found = []
        for digest in digest_chain(token_ids, self._page_size, max_pages, salt):
            entry = self._entries.get(digest)
            if entry is None:
                break
            found.append(entry)
        entries = np.array(found, np.int64)
        self._touch(entries)
        return tuple(pages[entries] for pages in self._pages)

    def publish(self, token_ids: Int64Array, pages: tuple[Int32Array, ...], salt: bytes = b"") -> None:
        """Indexes pages (per group int32 [n], full) as the KV of the first n pages of token_ids; known entries stay."""
        digests = list(digest_chain(token_ids, self._page_size, pages[0].size, salt))
        new = [page_index for page_index, digest in enumerate(digests) if digest not in self._entries]
        firsts = pages[0].tolist()
        for page_index in new:
            if firsts[page_index] in self._digests:
                raise InvalidArgument(
                    f"token_ids differ from those that page {page_index} of the sequence was published for"
                )
        for page_index in new:
            self._entries[digests[page_index]] = firsts[page_index]
            self._digests[firsts[page_index]] = digests[page_index]
        added = pages[0][new]
        self._indexed[added] = True
        self._keys[added] = keys = _keys([digests[page_index] for page_index in new])
        self._log.add(keys)
        for group, (allocator, ids) in enumerate(zip(self._allocators, pages, strict=True)):
            allocator.retain(ids[new])
            self._pages[group, added] = ids[new]
        self._touch(np.array([self._entries[digest] for digest in digests], np.int64))

    def evict(self, count: int) -> None:
        """Drops the `count` least recently used entries that no sequence uses, at least 1; there must be as many."""
        unused = np.flatnonzero(self._unused())
        oldest = np.argpartition(self._stamps[unused], count - 1)[:count]  # steps wait for it: sorting all takes longer
        self._drop(unused[oldest])

    def clear(self) -> None:
        """Drops all entries; pages that sequences use stay theirs."""
        self._drop(np.flatnonzero(self._indexed))

    def _unused(self) -> np.ndarray:
        return self._indexed & (self._allocators[0].references == 1)

    def _drop(self, entries: np.ndarray) -> None:
        for entry in entries.tolist():
            del self._entries[self._digests.pop(entry)]
        self._indexed[entries] = False
        self._log.remove(self._keys[entries])
        for allocator, pages in zip(self._allocators, self._pages, strict=True):
            allocator.release(pages[entries])

    def _touch(self, entries: np.ndarray) -> None:
        self._clock += entries.size
        self._stamps[entries] = self._clock - np.arange(entries.size)


def _keys(digests: list[bytes]) -> PrefixKeys:
    return np.frombuffer(b"".join([digest[:KEY_BYTES] for digest in digests]), "<u8").astype(np.uint64)
