"""Which whole pages and which single slots to copy, so that copies are as long as they can be."""

from dataclasses import dataclass

import numpy as np

from tandem.cache.errors import InvalidArgument
from tandem.cache.position_map import Int32Array


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Copies from one pool to another; together they cover each slot pair once.

    source_pages, target_pages, num_pages: int32 [r]; run i copies num_pages[i] consecutive pages.
    source_slots, target_slots: int32 [s]; what does not make whole pages.
    """

    source_pages: Int32Array
    target_pages: Int32Array
    num_pages: Int32Array
    source_slots: Int32Array
    target_slots: Int32Array


def plan_copy(source_slots: Int32Array, target_slots: Int32Array, page_size: int) -> CopyPlan:
    """Plans source_slots[i] → target_slots[i] (int32 [n] each, none skipped); target slots must be distinct."""
    if source_slots.shape != target_slots.shape or source_slots.ndim != 1:
        raise InvalidArgument(
            f"source_slots has shape {source_slots.shape} and target_slots {target_slots.shape}; both must be [n]"
        )
    count = source_slots.size
    if not count:
        empty = np.empty(0, np.int32)
        return CopyPlan(empty, empty, empty, empty, empty)
    broken = (np.diff(source_slots) != 1) | (np.diff(target_slots) != 1)
    begins = np.concatenate(([0], np.flatnonzero(broken) + 1))
    lengths = np.diff(begins, append=count)
    # Whole pages exist where both sides stand at the same offset; `lead` slots come before the first of them.
    lead = -source_slots[begins] % page_size
    aligned = (source_slots[begins] - target_slots[begins]) % page_size == 0
    whole = np.where(aligned, np.maximum(lengths - lead, 0) // page_size, 0)
    runs = np.flatnonzero(whole)
    first, num_pages = (begins + lead)[runs], whole[runs].astype(np.int32)
    edges = np.zeros(count + 1, np.int8)
    np.add.at(edges, first, 1)
    np.add.at(edges, first + num_pages * page_size, -1)
    single = np.cumsum(edges[:-1]) == 0
    return CopyPlan(
        (source_slots[first] // page_size).astype(np.int32),
        (target_slots[first] // page_size).astype(np.int32),
        num_pages,
        source_slots[single],
        target_slots[single],
    )
