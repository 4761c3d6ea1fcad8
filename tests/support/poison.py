"""Fills every page that nobody holds with NaN. A reader of a freed page's KV then shows it in its tokens."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.plan.arrays import Int32Array


def poison_free_pages(cache: PagedKVCache, pools: Sequence[Tensor]) -> None:
    """Fills free pages with NaN, now and whenever a page becomes free. Called on the thread that owns the cache."""
    for allocator, pool in zip(cache._pools.allocators, pools, strict=True):
        pool[np.flatnonzero(allocator._free)] = float("nan")
        allocator._lower = partial(_lower, allocator, pool)  # type: ignore[method-assign]


def _lower(allocator: PageAllocator, pool: Tensor, pages: Int32Array, verb: str, *, of_writers: bool) -> None:
    before = allocator._free.copy()
    PageAllocator._lower(allocator, pages, verb, of_writers=of_writers)
    pool[np.flatnonzero(allocator._free & ~before)] = float("nan")
