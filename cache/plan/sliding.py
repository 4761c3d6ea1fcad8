"""How sequences slide, and where the K of each is rotated already."""

from dataclasses import dataclass
from typing import NamedTuple

from tandem.cache.plan.arrays import Int64Array

NO_WINDOW = 1 << 62
"""The window of a sequence that evicts nothing, though some of its K is stored before RoPE."""


class Sliding(NamedTuple):
    """How a sequence slides: see PagedKVCache.enable_sliding_window.

    rotated: K of positions before it is stored rotated by its position, that of later ones before RoPE."""

    window: int
    sink: int
    evict_after: bool = False
    rotated: int = 0


@dataclass(frozen=True, eq=False)
class SlidingRows:
    """Where B sequences stand in a forward, int64 [B] each, in indices of page tables (see SlidingTable).

    sinks, holes: of each. turned_sinks, turned: sinks below the first, and others below the second, are stored rotated
    by their positions. indices, positions: of the newest token, among what is left and in the text. still: the row of
    the table of rotations that rotates nothing.
    """

    sinks: Int64Array
    holes: Int64Array
    turned_sinks: Int64Array
    turned: Int64Array
    indices: Int64Array
    positions: Int64Array
    still: int
