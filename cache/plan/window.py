"""Which of a sequence's positions and page indexes a layer group still needs: all, or those in its window.

A query at position p sees positions p - window + 1 … p, its own included (transformers' sliding_window). Place i is the
page of positions i · page_size … (i + 1) · page_size - 1; pages are let go of as a whole.
"""

import numpy as np

from tandem.cache.plan.arrays import Int64Array


def first_seen(window: int | None, queries: Int64Array) -> Int64Array:
    """int64 [n]: the first position that a query at each of `queries` (int64 [n]) sees; 0 without a window."""
    return np.zeros_like(queries) if window is None else np.maximum(queries - (window - 1), 0)


def first_page_indexes(window: int, queries: Int64Array, page_size: int) -> Int64Array:
    """int64 [B]: the first page index that a query at each of `queries` (int64 [B]), or after it, can see."""
    return first_seen(window, queries) // page_size


def first_page_index(window: int | None, query: int, page_size: int) -> int:
    """first_page_indexes() of one query; 0 without a window."""
    return 0 if window is None else max(query - window + 1, 0) // page_size


def most_pages(window: int | None, num_tokens: int, longest_append: int, page_size: int) -> int:
    """The most pages that a sequence of up to num_tokens positions needs at once, in forwards that append up to
    longest_append."""
    total = -(-num_tokens // page_size)
    if window is None:
        return total
    seen = window - 1 + max(longest_append, 1)  # by the queries of one forward together
    return min(total, -(-(seen - 1) // page_size) + 1)
