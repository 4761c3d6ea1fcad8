"""The pages of one pool: their references, the remote writers that hold them, and which are free.

page_counts.c takes pages and gives them back. Without a C compiler numpy does.
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tandem.cache.kernels.build.native_build import load_short_calls
from tandem.cache.plan.arrays import Int32Array, address_of
from tandem.cache.plan.errors import InvalidArgument, OutOfPages

SOURCE = Path(__file__).parents[1] / "kernels" / "native" / "page_counts.c"
POINTER, INT32 = ctypes.c_void_p, ctypes.c_int32
ONE = np.int32(1)  # an int would be cast for each page


class PageAllocator:
    """Reference counts of `num_pages` pages. Long runs are taken first, so position maps are short and writes large.

    Two counts keep a page: references (sequences and the prefix index read it) and writers (a remote writer may still
    write it). The page is free when both are 0. It drains when only writers is above 0.

        allocate ──► references 1 ──retain/release──► 0 ─┐
                     writers 0 ────hold/settle─────► 0 ─┴─► free
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InvalidArgument(f"num_pages is {num_pages}; it must be at least 1")
        self.num_pages = num_pages
        self.num_free = num_pages
        self.num_draining = 0
        self._references = np.zeros(num_pages, np.int32)
        self._writers = np.zeros(num_pages, np.int32)
        self._edged = np.zeros(num_pages + 2, np.bool_)  # whether each page is free, between two that never are
        self._free = self._edged[1:-1]
        self._free[:] = True

    @property
    def references(self) -> NDArray[np.int32]:
        """int32 [num_pages]: the count of each page; to be read only."""
        return self._references

    def are_shared(self, pages: Int32Array) -> NDArray[np.bool_]:
        """Whether each of these pages has another user than the caller."""
        return self._references[pages] > 1

    def allocate(self, count: int) -> Int32Array:
        """int32 [count], ascending, one reference each: from the shortest free run that holds them all, else from few
        long runs. OutOfPages changes nothing."""
        if count > self.num_free:
            raise OutOfPages(count, self.num_free)
        if count == 0:
            return np.empty(0, np.int32)
        self.num_free -= count
        library = load_page_counts()
        if library is not None:
            pages = np.empty(count, np.int32)
            free = address_of(self._free)
            if library.take_run(free, self.num_pages, count, address_of(self._references), address_of(pages)):
                return pages
        pages = self._pick(count)
        at = pages.astype(np.intp)  # numpy looks up by these several times as fast
        self._references[at], self._free[at] = 1, False
        return pages

    def retain(self, pages: Int32Array) -> None:
        """Adds a reference to each of `pages`, which must have one."""
        self._raise(self._references, pages, "retained")

    def release(self, pages: Int32Array) -> None:
        """One reference less for each of `pages`; InvalidArgument, and nothing changed, when one has none left."""
        self._lower(pages, "released", of_writers=False)

    def count_freed(self, pages: Int32Array) -> int:
        """Returns how many pages release(pages) would make free."""
        ids, times = np.unique(pages, return_counts=True)
        return int(np.count_nonzero((self._references[ids] == times) & (self._writers[ids] == 0)))

    def hold(self, pages: Int32Array) -> None:
        """A remote writer may write into `pages` (referenced) until settle()."""
        self._raise(self._writers, pages, "held for a writer")

    def settle(self, pages: Int32Array) -> None:
        """Ends a writer's holds on `pages`, because it is quiet. InvalidArgument, and nothing changed, when a page
        has no hold."""
        self._lower(pages, "settled", of_writers=True)

    def _raise(self, counts: NDArray[np.int32], pages: Int32Array, verb: str) -> None:
        if pages.size and int(self._references[pages].min()) < 1:
            raise InvalidArgument(f"a page without a reference cannot be {verb}; allocate it")
        np.add.at(counts, pages.astype(np.intp), ONE)

    def _lower(self, pages: Int32Array, verb: str, *, of_writers: bool) -> None:
        if pages.size == 0:
            return
        library = load_page_counts()
        lowered = (
            self._lower_by_numpy(pages, of_writers) if library is None else self._lower_by(library, pages, of_writers)
        )
        if not lowered:
            raise InvalidArgument(f"pages {pages.tolist()[:8]} … are {verb} more often than they were taken")

    def _lower_by(self, library: ctypes.PyDLL, pages: Int32Array, of_writers: bool) -> bool:
        own, changes = np.array(pages, np.int32), np.empty(2, np.int64)
        counts = address_of(self._references), address_of(self._writers), address_of(self._free)
        if not library.lower_counts(*counts, own.size, address_of(own), of_writers, address_of(changes)):
            return False
        freed, draining = changes.tolist()
        self.num_free += freed
        self.num_draining += draining
        return True

    def _lower_by_numpy(self, pages: Int32Array, of_writers: bool) -> bool:
        counts = self._writers if of_writers else self._references
        at = pages.astype(np.intp)
        held = np.count_nonzero(self._writers[at]) > 0  # else none of them drains, before or after
        draining_before = self._count_draining(at) if held else 0
        np.subtract.at(counts, at, ONE)
        left = counts[at]
        if int(left.min()) < 0:
            np.add.at(counts, at, ONE)
            return False
        if held:
            left = self._references[at] + self._writers[at]
            self.num_draining += self._count_draining(at) - draining_before
        self._free[at[left == 0]] = True
        self.num_free = int(np.count_nonzero(self._free))
        return True

    def _count_draining(self, pages: NDArray[np.intp]) -> int:
        draining = pages[(self._references[pages] == 0) & (self._writers[pages] > 0)]
        return np.unique(draining).size

    def _pick(self, count: int) -> Int32Array:
        edges = (self._edged[1:] != self._edged[:-1]).nonzero()[0]
        starts = edges[::2]
        lengths = edges[1::2] - starts
        fitting = (lengths >= count).nonzero()[0]
        if fitting.size:
            first = int(starts[fitting[lengths[fitting].argmin()]])
            return np.arange(first, first + count, dtype=np.int32)
        longest_first = np.argsort(-lengths, kind="stable")
        ends = np.cumsum(lengths[longest_first])
        whole = int(np.searchsorted(ends, count))  # runs that are taken up entirely
        rest = count - int(ends[whole - 1])
        left = longest_first[whole:]
        tightest = left[int(np.searchsorted(-lengths[left], -rest, side="right")) - 1]
        begins = np.append(starts[longest_first[:whole]], starts[tightest])
        sizes = np.append(lengths[longest_first[:whole]], rest)
        return np.sort(np.repeat(begins - np.cumsum(sizes) + sizes, sizes) + np.arange(count)).astype(np.int32)


@cache
def load_page_counts() -> ctypes.PyDLL | None:
    """Loads page_counts.c; None where it cannot be built."""
    library = load_short_calls(SOURCE)
    if library is not None:
        library.take_run.argtypes = (POINTER, INT32, INT32, POINTER, POINTER)
        library.lower_counts.argtypes = (*(POINTER,) * 3, INT32, POINTER, INT32, POINTER)
    return library
