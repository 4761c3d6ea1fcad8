"""Spans: which entries of a sequence a layer group keeps. Entry i of a group belongs to position i. In a group that
keeps an entry for `every` positions it belongs to positions i · every … (i + 1) · every - 1, once all are there.

Page index i holds the entries i · page_size … (i + 1) · page_size - 1. Pages are dropped as a whole, and later than a
query could spare them. Entries that a query at the start of its page needs stay until a query stands in the next page.
So a prefix that ends with full pages can be shared. Where pages of groups cover unlike numbers of positions, the
coarsest page counts: `grain` is its number of positions.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tandem.cache.plan.arrays import Int64Array, integer


class Span(ABC):
    """What the queries of a layer group need of a sequence. Allocator, plan, position map and transfer ask it."""

    drops_past = False
    """Whether entries leave the span as a sequence grows, so that their pages are dropped."""
    given = False
    """Whether the entries are an encoder's: see Given."""
    last = False
    """Whether a sequence has one entry, which each forward replaces: see Last."""

    @property
    def window(self) -> int | None:
        """How many positions a query sees, its own included, as attention kernels take it; None: all before it."""
        return None

    @property
    def chunk(self) -> int | None:
        """The number of positions of a chunk, if a query sees its own chunk only; else None."""
        return None

    @property
    def every(self) -> int:
        """How many positions an entry stands for."""
        return 1

    def paging(self, page_size: int) -> "Paging":
        """page_size: positions of a page, of groups with an entry for each."""
        return Paging(self.every, math.lcm(self.every, page_size) // self.every)

    def first_wanted(self, query: int, paging: "Paging", grain: int) -> int:
        """The first entry that a receiver stores when its next query stands at position `query`."""
        return self.first_page_index(query, paging.entries, grain) * paging.entries

    @abstractmethod
    def first_needed(self, queries: Int64Array) -> Int64Array:
        """int64 [n]: the first entry that a query at each position of `queries` (int64 [n]), or after it, needs."""

    @abstractmethod
    def most_pages(self, num_tokens: int, longest_append: int, page_size: int, grain: int | None = None) -> int:
        """The most pages that a sequence of up to num_tokens positions keeps at once, with forwards that append up to
        longest_append. page_size: entries of a page. grain: positions of the coarsest page; None: page_size."""

    def first_pages(self, queries: Int64Array, page_size: int, grain: int | None = None) -> Int64Array:
        """int64 [n]: the first page index that is kept when the next query stands at `queries` (int64 [n]): the first
        that one at the start of its coarsest page needs. page_size, grain: as for most_pages()."""
        return self.first_needed(queries - queries % (grain or page_size)) // page_size

    def first_page_index(self, query: int, page_size: int, grain: int | None = None) -> int:
        """Computes first_pages() for one query."""
        return int(self.first_pages(np.array(query), page_size, grain))


@dataclass(frozen=True)
class All(Span):
    """Every query needs all entries, as in full attention."""

    def first_needed(self, queries: Int64Array) -> Int64Array:
        return np.zeros_like(queries)

    def first_pages(self, queries: Int64Array, page_size: int, grain: int | None = None) -> Int64Array:
        return np.zeros_like(queries)

    def most_pages(self, num_tokens: int, longest_append: int, page_size: int, grain: int | None = None) -> int:
        return -(-(num_tokens // self.every) // page_size)


@dataclass(frozen=True)
class Every(All):
    """Every query needs all entries, of `positions` positions each: n positions have ⌊n / positions⌋ (compressed KV, as
    in DeepSeek-V4).

    InvalidArgument unless positions is an integer of at least 2.
    """

    positions: int

    def __post_init__(self) -> None:
        integer("positions of an entry", self.positions, least=2)

    @property
    def every(self) -> int:
        return self.positions


@dataclass(frozen=True)
class Window(Span):
    """A query at p needs the entries of positions p - size + 1 … p (transformers' sliding_window).

    InvalidArgument unless size is an integer of at least 1.
    """

    size: int

    drops_past = True

    def __post_init__(self) -> None:
        integer("size of the window", self.size, least=1)

    @property
    def window(self) -> int:
        return self.size

    def first_needed(self, queries: Int64Array) -> Int64Array:
        return np.maximum(queries - (self.size - 1), 0)

    def most_pages(self, num_tokens: int, longest_append: int, page_size: int, grain: int | None = None) -> int:
        before = -(-(self.size - 1) // page_size)  # the coarsest page that the first query stands in
        # It, and what follows if it is nearly full.
        grown = ((grain or page_size) - 2 + max(longest_append, 1)) // page_size + 1
        return min(-(-num_tokens // page_size), before + grown)


@dataclass(frozen=True)
class Chunk(Span):
    """A query at p needs the entries of its chunk up to its own: ⌊p / size⌋ · size … p (transformers' chunked
    attention). A chunk is some whole pages.

    InvalidArgument unless size is an integer of at least 1.
    """

    size: int

    drops_past = True

    def __post_init__(self) -> None:
        integer("size of the chunk", self.size, least=1)

    @property
    def chunk(self) -> int:
        return self.size

    def first_needed(self, queries: Int64Array) -> Int64Array:
        return queries - queries % self.size

    def most_pages(self, num_tokens: int, longest_append: int, page_size: int, grain: int | None = None) -> int:
        reached = self.size - 1 + max(longest_append, 1)  # from the start of the chunk that the first query ends
        if grain is not None and self.size % grain:
            reached += grain - 1  # or of the one before, where the coarsest page of the query begins
        return min(-(-num_tokens // page_size), -(-reached // page_size))


@dataclass(frozen=True)
class Given(Span):
    """The entries of an encoder, before the border of their sequence: every query after the border needs all entries.

    A sequence of a layout with such groups begins with its encoder's positions, padded to whole pages: see
    PagedKVCache.encode. Its other groups keep what is after the border. So each position has an entry in one kind.
    """

    given = True

    def first_needed(self, queries: Int64Array) -> Int64Array:
        return np.zeros_like(queries)

    def most_pages(self, num_tokens: int, longest_append: int, page_size: int, grain: int | None = None) -> int:
        return -(-num_tokens // page_size)


@dataclass(frozen=True)
class Last(Span):
    """A query at p needs what the positions before p have left: one entry, which each forward replaces (the state of a
    recurrent layer).

    A sequence has one page, which holds the entry of its last position. So it is sent only where it ends, and forked or
    shortened there or at a snapshot of an earlier entry.
    """

    last = True

    def paging(self, page_size: int) -> "Paging":
        return Paging(1, 1, whole=True)

    def first_wanted(self, query: int, paging: "Paging", grain: int) -> int:
        return max(query - 1, 0)

    def first_needed(self, queries: Int64Array) -> Int64Array:
        return np.maximum(queries - 1, 0)

    def first_pages(self, queries: Int64Array, page_size: int, grain: int | None = None) -> Int64Array:
        return np.zeros_like(queries)

    def most_pages(self, num_tokens: int, longest_append: int, page_size: int, grain: int | None = None) -> int:
        return min(num_tokens, 1)


ALL, LAST = All(), Last()


def span_of(window: int | None) -> Span:
    """The span of layers whose tokens see `window` positions, their own included; None: all."""
    return ALL if window is None else Window(window)


NO_WINDOW = 1 << 62
"""The window of a sequence that evicts nothing, though some of its K is stored before RoPE."""


MAX_POSITIONS = 1 << 30
"""More than a sequence has."""


class Paging(NamedTuple):
    """How positions become pages: an entry for `every` positions, and `entries` in a page. whole: one page holds a
    whole sequence, but of all its entries only the last; then a slot is a page."""

    every: int
    entries: int
    whole: bool = False

    @property
    def reach(self) -> int:
        """Entries of a page, by which page indexes are counted; `entries` is how many it has memory for."""
        return MAX_POSITIONS if self.whole else self.entries

    @property
    def positions(self) -> int:
        """The positions of a page."""
        return self.every * self.reach

    def num_entries(self, length: int) -> int:
        """Returns the number of entries of `length` positions."""
        return length if self.every == 1 else length // self.every

    def num_pages(self, length: int) -> int:
        """Returns the number of pages that hold the entries of `length` positions."""
        return -(-self.num_entries(length) // self.reach)

    def ends_in_page(self, length: int) -> bool:
        """Whether `length` positions use a part of their last page."""
        return self.num_entries(length) % self.reach > 0

    def padded(self, length: int) -> int:
        """Positions of so many whole pages as `length` positions begin."""
        return -(-length // self.positions) * self.positions


class Sliding(NamedTuple):
    """How a sequence slides: see PagedKVCache.enable_sliding_window.

    rotated: K of earlier positions is stored rotated by its position, K of later ones before RoPE."""

    window: int
    sink: int
    evict_after: bool = False
    rotated: int = 0
