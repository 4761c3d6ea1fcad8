"""The number of pages of each layer group's pool. What a group keeps may bound the pages that it can ever use."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from tandem.cache.plan.layout import KVLayout

STATES_A_SNAPSHOT = 16
"""However few pages keep all, snapshots take a sixteenth of what the states of sequences take: decision 0156."""


@dataclass(frozen=True)
class PageUse:
    """A use of pools: at most `sequences` hold pages at a time, of up to `length` positions, in forwards that append
    up to `append` positions to a sequence."""

    sequences: int
    length: int
    append: int


class SnapshotRule(NamedTuple):
    """The rule by which snapshots of states are taken. every: positions between two of a sequence, a multiple of
    page_size. most: pages of snapshots that sequences hold at once, without the prefix index's; 0: none are
    taken. drafted: sequences with drafts in one forward. Each has one of the last pages of the pool, which nobody else
    gets, for the state before."""

    every: int
    most: int
    drafted: int = 0


NO_SNAPSHOTS = SnapshotRule(1, 0)


class StateUse(NamedTuple):
    """Pages of states, in addition to one for each sequence. share: of the bytes of pages that keep all, see
    num_snapshots. drafted: see SnapshotRule."""

    share: float = 0.0
    drafted: int = 0


NO_STATES = StateUse()


def num_snapshots(layout: KVLayout, num_pages: int, uses: Sequence[PageUse], share: float) -> int:
    """How many snapshots of states there is room for: those that fit into `share` of the bytes of num_pages pages that
    keep all, and at least one for each STATES_A_SNAPSHOT sequences of `uses`. 0 in a layout without states, or where
    share is 0."""
    state_bytes = sum(layout.page_bytes(group) for group, paging in enumerate(layout.paging) if paging.whole)
    if not state_bytes or not share:
        return 0
    fit = int(share * num_pages * layout.page_size * layout.token_bytes) // state_bytes
    return max(fit, -(-_num_states(num_pages, uses) // STATES_A_SNAPSHOT))


def _num_states(num_pages: int, uses: Sequence[PageUse]) -> int:
    """Returns the number of states: one for each sequence that has a page."""
    return min(num_pages, sum(use.sequences for use in uses))


def pages_of_groups(
    layout: KVLayout, num_pages: int, uses: Sequence[PageUse], states: StateUse = NO_STATES
) -> tuple[int, ...]:
    """Returns the number of pages of each group.

    A group that keeps all gets num_pages, because it holds prefixes in what sequences leave. A group that drops pages
    gets what the most demanding of `uses` can hold, if that is less. If a page covers several times page_size
    positions, the group gets enough pages for the positions of num_pages, and one more for each sequence, whose last
    page may not be full. If a page covers a sequence, the group gets one for each sequence of `uses`, and the pages of
    `states`."""
    beside = num_snapshots(layout, num_pages, uses, states.share) + states.drafted

    def most(group: int) -> int:
        return max(use.sequences * layout.most_pages(group, use.length, use.append) for use in uses)

    def pages_of(group: int, together: int) -> int:
        if layout.paging[group].whole:
            return _num_states(num_pages, uses) + beside
        if layout.groups[group].keeps.drops_past:
            return min(num_pages, most(group))
        return min(num_pages, -(-num_pages // together) + max(use.sequences for use in uses) * (together > 1))

    return tuple(pages_of(group, together) for group, together in enumerate(layout.pages_together))


def num_pages_in(layout: KVLayout, num_bytes: int, uses: Sequence[PageUse], states: StateUse = NO_STATES) -> int:
    """The most num_pages for which all pools together, by pages_of_groups(), have num_bytes; 0 when one is too many."""
    page_bytes = [layout.page_bytes(group) for group in range(len(layout.groups))]

    def bytes_of(num_pages: int) -> int:
        return sum(map(mul, pages_of_groups(layout, num_pages, uses, states), page_bytes))

    most = num_bytes // min(page_bytes) * max(layout.pages_together)
    return bisect_right(range(1, most + 1), num_bytes, key=bytes_of)
