"""One validator for position maps, used by both sides of a transfer."""

import numpy as np

from tandem.cache.layout import KVLayout
from tandem.cache.position_map import SKIP, PositionMap, SlotRuns
from tandem.cache.window import first_place
from tandem.transfer.errors import InvalidPositionMap


def validate_map(
    position_map: PositionMap,
    layout: KVLayout,
    *,
    num_pages: tuple[int, ...],
    expected_start: int,
    expected_tokens: int,
) -> None:
    """Raises InvalidPositionMap unless the map covers exactly the expected positions, each with a slot of its own.

    num_pages: per layer group, pages in the receiver's pool. A receiver's map skips the positions of pages that are
    behind the window of the group when all has landed, and no others.
    """
    if len(position_map.runs) != len(layout.groups):
        raise InvalidPositionMap(
            f"runs holds {len(position_map.runs)} layer groups; the layout has {len(layout.groups)}"
        )
    if position_map.start_position != expected_start:
        raise InvalidPositionMap(f"start_position is {position_map.start_position}; {expected_start} is expected")
    if position_map.num_tokens != expected_tokens:
        raise InvalidPositionMap(f"num_tokens is {position_map.num_tokens}; {expected_tokens} is expected")
    for group, runs in enumerate(position_map.runs):
        end, size = position_map.end_position, layout.page_size
        needed = min(first_place(layout.groups[group].window, end, size) * size, end)
        skipped = max(needed - position_map.start_position, 0)
        _validate_runs(runs, f"runs[{group}]", skipped, num_pages[group] * size)


def _validate_runs(runs: SlotRuns, field: str, skipped: int, num_slots: int) -> None:
    if not runs.begins.size:
        return
    skips, first = runs.begins == SKIP, int(skipped > 0)
    if runs.num_skipped != skipped or np.count_nonzero(skips) != first:
        count = int(runs.lengths[skips].sum())
        raise InvalidPositionMap(f"{field} skips {count} positions; it must skip the first {skipped} and no others")
    begins, lengths = runs.begins[first:], runs.lengths[first:]
    if not begins.size:
        return
    order = begins.argsort()
    begins = begins[order].astype(np.int64)
    ends = begins + lengths[order]
    if int(ends.max()) > num_slots:
        raise InvalidPositionMap(
            f"{field} holds slots {int(begins[0])} … {int(ends.max()) - 1}; the pool has 0 … {num_slots - 1}"
        )
    overlaps = (begins[1:] < ends[:-1]).nonzero()[0]
    if overlaps.size:
        raise InvalidPositionMap(f"{field} holds slot {int(begins[1:][overlaps[0]])} twice; slots must be distinct")
