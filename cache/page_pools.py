"""The pages of all layer groups, handed out together, and the prefix index that gives way when they run out."""

import numpy as np
from numpy.typing import NDArray

from tandem.cache.allocator import PageAllocator
from tandem.cache.errors import OutOfPages
from tandem.cache.position_map import Int32Array
from tandem.cache.prefix_index import PrefixIndex

PageIds = tuple[Int32Array, ...]
"""Per layer group int32 [n]: n pages of each. Place i of a sequence is one page in every group."""


class PagePools:
    """An allocator per layer group. All groups gain and lose pages by the same calls, so their counts go together."""

    def __init__(self, num_pages: tuple[int, ...], page_size: int) -> None:
        self._allocators = tuple(PageAllocator(count) for count in num_pages)
        self.prefixes = PrefixIndex(self._allocators, page_size)

    @property
    def num_pages(self) -> int:
        return min(allocator.num_pages for allocator in self._allocators)

    @property
    def num_free(self) -> int:
        """Pages that allocate() can give, those included that only the prefix index uses."""
        return self._num_vacant() + self.prefixes.num_evictable

    @property
    def num_draining(self) -> int:
        return max(allocator.num_draining for allocator in self._allocators)

    def allocate(self, count: int) -> PageIds:
        """`count` pages of each group; evicts prefixes where free ones do not suffice. OutOfPages changes nothing."""
        missing = count - self._num_vacant()
        if missing > 0:
            evictable = self.prefixes.num_evictable
            if missing > evictable:
                raise OutOfPages(count, count - missing + evictable)
            self.prefixes.evict(missing)
        return tuple(allocator.allocate(count) for allocator in self._allocators)

    def are_shared(self, pages: Int32Array) -> NDArray[np.bool_]:
        """Whether each of these pages of group 0 has another user than the one who asks."""
        return self._allocators[0].references[pages] > 1

    def retain(self, pages: PageIds) -> None:
        for allocator, ids in zip(self._allocators, pages, strict=True):
            allocator.retain(ids)

    def release(self, pages: PageIds) -> None:
        for allocator, ids in zip(self._allocators, pages, strict=True):
            allocator.release(ids)

    def hold(self, pages: PageIds) -> None:
        for allocator, ids in zip(self._allocators, pages, strict=True):
            allocator.hold(ids)

    def settle(self, pages: PageIds) -> None:
        for allocator, ids in zip(self._allocators, pages, strict=True):
            allocator.settle(ids)

    def _num_vacant(self) -> int:
        return min(allocator.num_free for allocator in self._allocators)
