"""A position map as the control plane carries it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.cache.plan.position_map import SKIP, PositionMap, SlotRuns
from tandem.transfer.codec import decode_runs, encode_runs
from tandem.transfer.errors import InvalidPositionMap

if TYPE_CHECKING:  # processes that read requests for the gateway must not wait for torch
    from tandem.cache.plan.layout import KVLayout


@dataclass(frozen=True)
class WireMap:
    """The fields of tandem.v1.PositionMap under the same names. Nothing in it has been checked."""

    start_position: int
    num_tokens: int
    page_size: int
    runs: tuple[bytes, ...]
    layout_fingerprint: int


def encode_map(position_map: PositionMap, layout: "KVLayout") -> WireMap:
    """InvalidPositionMap for the map of a sequence that slides, which no message carries."""
    if position_map.sliding is not None:
        raise InvalidPositionMap(f"sliding is {position_map.sliding}; only maps of sequences that do not are carried")
    return WireMap(
        start_position=position_map.start_position,
        num_tokens=position_map.num_tokens,
        page_size=layout.page_size,
        runs=tuple(encode_runs(runs) for runs in position_map.runs),
        layout_fingerprint=layout.fingerprint,
    )


def decode_map(
    wire: WireMap, layout: "KVLayout", *, num_pages: tuple[int, ...], expected_start: int, expected_tokens: int
) -> PositionMap:
    """The map that `wire` stands for, wholly validated; InvalidPositionMap says what is wrong.

    num_pages: per layer group, pages in the receiver's pool; expected_start, expected_tokens: the positions that the
    caller knows the map must cover, each with a slot of its own. A receiver's map skips the positions of pages that
    the group no longer keeps when all has landed, and no others.
    """
    for field, value, expected in (
        ("page_size", wire.page_size, layout.page_size),
        ("layout_fingerprint", f"{wire.layout_fingerprint:#018x}", f"{layout.fingerprint:#018x}"),
        ("start_position", wire.start_position, expected_start),
        ("num_tokens", wire.num_tokens, expected_tokens),
    ):
        if value != expected:
            raise InvalidPositionMap(f"{field} is {value}; {expected} is expected")
    if len(wire.runs) != len(layout.groups):
        raise InvalidPositionMap(f"runs holds {len(wire.runs)} layer groups; the layout has {len(layout.groups)}")
    runs = tuple(_decode_group(f"runs[{group}]", data, expected_tokens) for group, data in enumerate(wire.runs))
    end, size = expected_start + expected_tokens, layout.page_size
    for group, decoded in enumerate(runs):
        needed = min(layout.groups[group].keeps.first_page_index(end, size) * size, end)
        skipped = max(needed - expected_start, 0)
        _check_slots(f"runs[{group}]", decoded, skipped, num_pages[group] * size)
    return PositionMap(expected_start, runs)


def _decode_group(field: str, data: bytes, expected_tokens: int) -> SlotRuns:
    try:
        runs = decode_runs(data, max_tokens=expected_tokens)
    except InvalidPositionMap as error:
        raise InvalidPositionMap(f"{field}: {error}") from error
    if runs.num_tokens != expected_tokens:
        raise InvalidPositionMap(f"{field} holds {runs.num_tokens} positions; {expected_tokens} are expected")
    return runs


def _check_slots(field: str, runs: SlotRuns, skipped: int, num_slots: int) -> None:
    if not runs.begins.size:
        return
    skips, first = runs.begins == SKIP, int(skipped > 0)
    if runs.num_skipped != skipped or np.count_nonzero(skips) != first:
        count = int(runs.lengths[skips].sum())
        raise InvalidPositionMap(f"{field} skips {count} positions; it must skip the first {skipped} and no others")
    begins = runs.begins[first:].astype(np.int64)
    if not begins.size:
        return
    ends = begins + runs.lengths[first:]
    last = int(ends.max()) - 1
    if last >= num_slots:
        raise InvalidPositionMap(f"{field} holds slots {int(begins.min())} … {last}; the pool has 0 … {num_slots - 1}")
    order = begins.argsort()
    begins, ends = begins[order], ends[order]
    overlaps = (begins[1:] < ends[:-1]).nonzero()[0]
    if overlaps.size:
        raise InvalidPositionMap(f"{field} holds slot {int(begins[1:][overlaps[0]])} twice; slots must be distinct")
