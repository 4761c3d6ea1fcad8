"""The parking face of a cache: sequences go to host memory as a whole, and come back as they were."""

from typing import NamedTuple

import numpy as np

from tandem.cache.operations.parts import Parts
from tandem.cache.pages.page_pools import PageIds
from tandem.cache.plan.arrays import Int64Array, checked_reach
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.store.copies import NO_COPIES
from tandem.cache.store.parked_store import ParkedStore


class ParkedRow(NamedTuple):
    """The record of a parked sequence. begins, counts: for each group the page index of its first page with entries,
    and the number of pages with entries."""

    length: int
    encoder_len: int
    unclean: bool
    begins: Int64Array
    counts: Int64Array


class ParkingCalls(Parts):
    """park(), remove_sequence(), and later resume(). A sequence is parked as a whole: no peer and no tree has a part in
    it. Snapshots of its earlier states are not."""

    def keep_parked(self, store: ParkedStore) -> None:
        """Makes park() copy sequences into the store from now on. Call keep_evicted() first: the store then has the
        copies of that one."""
        if self._pools.copies not in (NO_COPIES, store.copies):
            raise InvalidArgument("store has copies of its own; it must have those of the store of keep_evicted()")
        self._pools.copies = store.copies
        self._parked, self._parked_rows = store, dict[int, ParkedRow]()

    def can_park(self, sequence: int) -> bool:
        """Whether park() takes the sequence, and the store has room for it in memory that is already pinned."""
        if self._parked is None or self._not_parkable(sequence):
            return False
        return self._parked.fits([pages.size for pages in self._pages_in_use(self._table.row(sequence))])

    def num_held(self, sequence: int) -> tuple[int, ...]:
        """How many pages of each layer group a sequence has, shared and reserved ones included."""
        return tuple(ids.size for ids in self._table.held_pages(self._table.row(sequence)))

    def park(self, sequence: int) -> None:
        """Begins to copy a sequence, which can_park(), into the store. It stays until it is removed; a sequence of the
        same id then comes back with resume(). Its pages may be removed at once: forwards and sends that write them wait
        for the copies, and peers by copies_past(). On a rank or in a replay whose memory is pinned later, park() waits
        for that; it raises MemoryError if the host could not pin it."""
        if self._parked is None:
            raise InvalidArgument("the cache has no store for parked sequences; keep_parked() gives it one")
        if reason := self._not_parkable(sequence):
            raise InvalidArgument(f"sequence {sequence} {reason}; only others are parked")
        row, table = self._table.row(sequence), self._table
        pages = self._pages_in_use(row)
        counts = np.array([ids.size for ids in pages], np.int64)
        if not self._parked.has_room(counts.tolist()):
            raise InvalidArgument(f"sequence {sequence} has {counts.tolist()} pages; the store has no room for them")
        self._parked.put(sequence, pages)
        begins = np.array([int(group.begins[row]) for group in table.groups], np.int64)
        self._parked_rows[sequence] = ParkedRow(
            int(table.lengths[row]), int(table.encoder_lens[row]), bool(table.unclean[row]), begins, counts
        )

    def resume(self, sequence: int, num_tokens: int, longest_append: int | None = None) -> PageIds:
        """Adds a parked sequence again, as it was, in pages of its own, and reserves room as reserve() does. The store
        forgets it. Returns the pages that it is copied back into; forwards and sends wait for that, see has_arrived().
        OutOfPages and OutOfSequences change nothing."""
        if self._parked is None or sequence not in self._parked:
            raise InvalidArgument(f"sequence {sequence} is not parked; park() comes first")
        num_tokens, longest = checked_reach(num_tokens, longest_append)
        self._table.check_length(sequence, num_tokens)
        was = self._parked_rows[sequence]
        row = self._table.add(sequence, was.encoder_len)
        try:
            pages = self._pools.allocate(was.counts.tolist())
            for group, begin, ids in zip(self._table.groups, was.begins.tolist(), pages, strict=True):
                group.place(row, begin, ids)
            self._table.lengths[row] = was.length
            self._pages.reserve(row, num_tokens, longest)
        except BaseException:
            self._pages.drop(row)
            self._table.remove(sequence)
            raise
        self._table.unclean[row] = was.unclean
        self._parked.fetch(sequence, pages)
        self._fences.arrive(row)
        self.drop_parked(sequence)
        return pages

    def drop_parked(self, sequence: int) -> None:
        """Makes the store forget a sequence. Idempotent."""
        if self._parked is not None:
            self._parked.drop(sequence)
            self._parked_rows.pop(sequence, None)

    @property
    def bytes_in_copies(self) -> int:
        """The bytes of parked sequences that are being copied, to the store and back."""
        return 0 if self._parked is None else self._parked.bytes_in_copies

    def _pages_in_use(self, row: int) -> PageIds:
        """Returns for each group the pages of a row that hold entries. Later pages are only reserved."""
        length = int(self._table.lengths[row])
        return tuple(group.held(row, 0, group.paging.num_pages(length)) for group in self._table.groups)

    def _not_parkable(self, sequence: int) -> str:
        """Why a sequence is not parked; empty where it may be."""
        row = self._table.row(sequence)
        if sequence in self._receptions.incoming or self._table.receiving[row]:
            return "is being received"
        if self._trees.is_open(sequence):
            return "has an open token tree"
        if self._marks.any_open(np.array([row])):
            return "is marked to be sent"
        if self._table.sliding.windows[row]:
            return "slides"
        if self.layout.recurs and any(of is not None and of.behind(np.array([row])) for of in self._pages.snapshots):
            return "has grown without its states"
        return ""
