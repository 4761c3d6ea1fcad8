"""One validator for position maps, used by both sides of a transfer."""

import numpy as np

from tandem.cache.layout import KVLayout
from tandem.cache.position_map import SKIP, PositionMap, SlotRuns
from tandem.transfer.errors import InvalidPositionMap


def validate_map(
    position_map: PositionMap, layout: KVLayout, *, num_pages: int, expected_start: int, expected_tokens: int
) -> None:
    """Raises InvalidPositionMap unless the map covers exactly the expected positions, each with a slot of its own.

    num_pages: pages in each of the receiver's pools. A receiver's map has no SKIP.
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
        _validate_runs(runs, f"runs[{group}]", num_pages * layout.page_size)


def _validate_runs(runs: SlotRuns, field: str, num_slots: int) -> None:
    if not runs.begins.size:
        return
    if np.any(runs.begins == SKIP):
        raise InvalidPositionMap(f"{field} skips positions; every position needs a slot")
    order = np.argsort(runs.begins)
    begins = runs.begins[order].astype(np.int64)
    ends = begins + runs.lengths[order]
    if int(begins[0]) < 0 or int(ends.max()) > num_slots:
        raise InvalidPositionMap(
            f"{field} holds slots {int(begins[0])} … {int(ends.max()) - 1}; the pool has 0 … {num_slots - 1}"
        )
    overlaps = np.flatnonzero(begins[1:] < ends[:-1])
    if overlaps.size:
        raise InvalidPositionMap(f"{field} holds slot {int(begins[1:][overlaps[0]])} twice; slots must be distinct")
