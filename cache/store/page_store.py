"""The contract of a tier below a worker's pools: it keeps pages that a prefix index evicts, and gives them back."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.store.copies import PageCopies
from tandem.cache.store.disk.disk_pages import DiskCounts


class NamedPages(NamedTuple):
    """Full pages of one layer group. digests[i] names pages[i], a page id of the group's pool: see digest_chain.
    pages: int32 [n]."""

    group: int
    digests: Sequence[bytes]
    pages: Int32Array


PageNames = tuple[int, Sequence[bytes]]
"""A group, and digests of pages of it."""


class StoreCounts(NamedTuple):
    """A store's size and its counts. capacity, used: bytes. The others count since the store was made: pages copied out
    of the pools and back, prompts for which pages came back, and pages refused because they had changed meanwhile."""

    capacity: int = 0
    used: int = 0
    pages_down: int = 0
    pages_up: int = 0
    hits: int = 0
    bad_pages: int = 0


class PageStore(Protocol):
    """Keeps copies of pages by their digests, which begin with a request's salt.

    Owned by the thread that owns the pools. Copies may take longer than the calls that begin them. What it holds
    follows from the calls before, in their order, so that the ranks of a worker and a replay agree on it.
    """

    @property
    def page_bytes(self) -> Sequence[int]:
        """The bytes of a page of each layer group."""
        ...

    @property
    def copies(self) -> PageCopies:
        """The copies under way. A forward waits there before it writes or reads their pages."""
        ...

    def put(self, evicted: NamedPages) -> None:
        """Copies pages that are about to be used for something else, the least recently used first. What the store has
        no room for it forgets, oldest first."""
        ...

    def has(self, digest: bytes) -> bool:
        """Returns whether it has a page of that name in any group."""
        ...

    def find(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """bool [n]: which pages of a group it has."""
        ...

    def widen(self, num_slots: Sequence[int]) -> None:
        """Keeps up to this many pages of each layer group from now on."""
        ...

    @property
    def ready_slots(self) -> tuple[int, ...] | None:
        """The pages of each group that its memory has room for by now, if more than it keeps. It depends on time, so
        the asking rank tells all ranks by widen(). Only the owner's thread asks."""
        ...

    def digests(self) -> list[bytes]:
        """Returns the digests of all pages in the store. A digest may occur for several groups."""
        ...

    def take_forgotten(self) -> list[bytes]:
        """Returns the digests of pages that it has forgotten since the last call. It may have some again, or in another
        group."""
        ...

    def held(self, wanted: Sequence[PageNames]) -> AbstractContextManager[None]:
        """Within the block put() forgets none of these pages, and refuses pages that find no other room. They count as
        just used, and the first ones as used last."""
        ...

    def fetch(self, wanted: Sequence[NamedPages]) -> list[NDArray[np.bool_]]:
        """Copies pages of one prompt back. Returns for each of `wanted` a bool [n]: which of its pages hold what their
        digests name, once they are copied. The others mean nothing."""
        ...

    @property
    def has_disk(self) -> bool:
        """Returns whether the store has a disk."""
        ...

    def find_below(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """bool [n]: which pages of a group the disk has; none without one. Depends on time, as tend() does."""
        ...

    def are_lifted(self, group: int, digests: Sequence[bytes]) -> NDArray[np.bool_]:
        """bool [n]: which pages came from the disk, and have not been fetched since."""
        ...

    def lift(self, wanted: Sequence[PageNames]) -> int:
        """Makes room for the pages that it lacks, and begins to read them from the disk. The others count as just used.
        Returns a number for is_lifted() and land(), 0 if there is no room or nothing to read. If an earlier call reads
        all these pages, returns the number of that call."""
        ...

    def is_lifted(self, number: int) -> bool:
        """Returns whether lift() has done what it can. It depends on time: all ranks learn it by land()."""
        ...

    def land(self, number: int) -> int:
        """Returns how many pages of lift() are known from now on: those that the disks of all ranks had. Waits for
        them. Once for each number, in their order."""
        ...

    def tend(self) -> list[bytes]:
        """Hands to the disk the pages that are due there. Returns digests of pages found on the disk since the last
        call. The owner calls it often."""
        ...

    @property
    def disk_rate(self) -> float:
        """Bytes a second that were read from the disk lately; 0 before."""
        ...

    @property
    def disk_counts(self) -> DiskCounts | None:
        """The disk's counts; None without a disk."""
        ...

    def close(self) -> None:
        """Ends its threads, and gives up the disk. Idempotent."""
        ...

    @property
    def counts(self) -> StoreCounts: ...
