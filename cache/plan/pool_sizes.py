"""How many pages the pool of each layer group gets: what a group keeps may bound what can ever be used of it."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import Span


@dataclass(frozen=True)
class PageUse:
    """At most `sequences` hold pages at a time, of up to `length` positions, in forwards that append up to `append`
    positions to one of them."""

    sequences: int
    length: int
    append: int


def pages_of_groups(layout: KVLayout, num_pages: int, uses: Sequence[PageUse]) -> tuple[int, ...]:
    """Of each group num_pages, or, where pages are let go of, as many as the most demanding of `uses` can hold if that
    is less. Groups that keep all hold prefixes in what sequences leave."""

    def most(span: Span) -> int:
        return max(use.sequences * span.most_pages(use.length, use.append, layout.page_size) for use in uses)

    spans = (group.keeps for group in layout.groups)
    return tuple(min(num_pages, most(span)) if span.drops_past else num_pages for span in spans)


def num_pages_in(layout: KVLayout, num_bytes: int, uses: Sequence[PageUse]) -> int:
    """The most num_pages for which all pools together, by pages_of_groups(), have num_bytes; 0 when one is too many."""
    page_bytes = [layout.page_bytes(group) for group in range(len(layout.groups))]

    def bytes_of(num_pages: int) -> int:
        return sum(map(mul, pages_of_groups(layout, num_pages, uses), page_bytes))

    return bisect_right(range(1, num_bytes // min(page_bytes) + 1), num_bytes, key=bytes_of)
