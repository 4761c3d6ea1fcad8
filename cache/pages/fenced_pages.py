"""Pages that are cleared and copied only once no copy between them and a store is in the way."""

from functools import partial

from tandem.cache.kernels.base import PageOperations
from tandem.cache.pages.page_pools import PagePools
from tandem.cache.plan.arrays import Int32Array


class FencedPages:
    """Moves the pages of one layer group, see PageOperations. Each call runs on the current stream, after the copies
    into its pages."""

    def __init__(self, memory: PageOperations, pools: PagePools, group: int) -> None:
        self._memory, self._pools, self._group = memory, pools, group

    def clear_pages(self, pages: Int32Array) -> None:
        self._pools.copies.wait_for(self._group, pages)
        self._memory.clear_pages(pages)

    def copy_pages(self, sources: Int32Array, targets: Int32Array) -> None:
        self._pools.copies.wait_for(self._group, sources)
        self._pools.copies.wait_for(self._group, targets)
        self._memory.copy_pages(sources, targets)

    def copy_arriving(self, source: Int32Array, target: Int32Array) -> None:
        """Copies pages like copy_pages(), even if the sources are still being copied from the store. Then the copy
        follows them."""
        self._pools.copies.follow(self._group, source, target, partial(self._memory.copy_pages, source, target))

    def compute_again(self, sequence: int, count: int, source: int, target: int) -> None:
        self._memory.compute_again(sequence, count, source, target)
