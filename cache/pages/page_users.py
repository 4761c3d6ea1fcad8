"""Counts the sequences that use a page, and the pages that each still needs when it drops one.

A reserved sequence with a window takes a page for each that leaves the window. A page that n sequences use becomes free
only with the last. So it is owed n - 1 times: each of the others takes another page instead.

    free pages + those that only the prefix index uses  ≥  owed pages

Where this holds, every reserved sequence can grow, whatever it shares with others.
"""

import numpy as np
from numpy.typing import NDArray

from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.plan.arrays import Int32Array


class PageUsers:
    """The references that sequences hold to the pages of one layer group, without the prefix index's."""

    def __init__(self, allocator: PageAllocator, indexed: NDArray[np.bool_] | None = None) -> None:
        """indexed: bool [num_pages], pages to which the prefix index holds a reference, of a group that drops what
        is past. None: the group keeps all, and owes nothing."""
        self.allocator = allocator
        self._indexed = indexed
        self.owes = indexed is not None
        self.num_owed = 0

    def are_shared(self, pages: Int32Array) -> NDArray[np.bool_]:
        """Whether each of these pages has another user than the caller."""
        return self.allocator.are_shared(pages)

    def retain(self, pages: Int32Array) -> None:
        """One sequence more uses each of `pages` (distinct), which must have a reference."""
        if self._indexed is not None and pages.size:
            self.num_owed += int(np.count_nonzero(self._counts(pages, self._indexed) > 0))
        self.allocator.retain(pages)

    def release(self, pages: Int32Array) -> None:
        """Ends one sequence's use of each of `pages`."""
        settled = self.num_settled(pages)
        self.allocator.release(pages)
        self.num_owed -= settled

    def num_settled(self, pages: Int32Array) -> int:
        """How many pages fewer are owed once `pages`, in which one may stand several times, are released."""
        if self._indexed is None or not self.num_owed or not pages.size:
            return 0
        ids, times = np.unique(pages, return_counts=True)
        others = self._counts(ids, self._indexed) - 1
        return int(np.minimum(others, times).sum())

    def _counts(self, pages: Int32Array, indexed: NDArray[np.bool_]) -> Int32Array:
        """Returns how many sequences use each of `pages`, int32 [n]."""
        return self.allocator.references[pages] - indexed[pages]
