"""A position map as the control plane carries it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import SKIP, PositionMap, SlotRuns
from tandem.cache.plan.spans import Sliding
from tandem.transfer.codec import decode_runs, encode_runs
from tandem.transfer.errors import InvalidPositionMap
from tandem.transfer.regions import regions_between

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
    sliding: Sliding | None = None


def encode_map(position_map: PositionMap, layout: "KVLayout") -> WireMap:
    return WireMap(
        start_position=position_map.start_position,
        num_tokens=position_map.num_tokens,
        page_size=layout.page_size,
        runs=tuple(encode_runs(runs) for runs in position_map.runs),
        layout_fingerprint=layout.fingerprint,
        sliding=position_map.sliding,
    )


def decode_map(
    wire: WireMap,
    layout: "KVLayout",
    *,
    num_pages: tuple[int, ...],
    expected_start: int,
    expected_tokens: int,
    receiver: "KVLayout | None" = None,
    border: int = 0,
) -> PositionMap:
    """Decodes and validates a map. InvalidPositionMap names what is wrong.

    layout: the sender's. receiver: the receiver's layout, if it is another shard of this one; None: `layout`.
    num_pages: per layer group, pages in the receiver's pool; expected_start, expected_tokens: the positions that the
    caller knows the map must cover, each with a slot of its own. A receiver's map skips the positions of pages that the
    group no longer keeps when all has landed, and no others. The map of a sliding sequence may also skip positions that
    its window does not show then. border: the number of the encoder's positions, padding included. Some groups skip
    these, the others skip all later ones.
    """
    expected_layout = layout if receiver is None else receiver
    try:
        regions_between(layout, expected_layout)
    except InvalidArgument as error:
        raise InvalidPositionMap(f"layout_fingerprint: the receiver has another layout: {error}") from error
    for field, value, expected in (
        ("page_size", wire.page_size, layout.page_size),
        ("layout_fingerprint", f"{wire.layout_fingerprint:#018x}", f"{expected_layout.fingerprint:#018x}"),
        ("start_position", wire.start_position, expected_start),
        ("num_tokens", wire.num_tokens, expected_tokens),
    ):
        if value != expected:
            raise InvalidPositionMap(f"{field} is {value}; {expected} is expected")
    if len(wire.runs) != len(layout.groups):
        raise InvalidPositionMap(f"runs holds {len(wire.runs)} layer groups; the layout has {len(layout.groups)}")
    start, end, found = expected_start, expected_start + expected_tokens, []
    for group, (data, paging) in enumerate(zip(wire.runs, layout.paging, strict=True)):
        first, last = paging.num_entries(start), paging.num_entries(end)
        decoded = _decode_group(f"runs[{group}]", data, last - first)
        if layout.groups[group].keeps.given:
            _check_tail(f"runs[{group}]", decoded, max(min(border, end) - start, 0))
        elif wire.sliding is None:
            needed = min(max(layout.first_wanted(group, end), border), last)
            _check_skips(f"runs[{group}]", decoded, max(needed - first, 0))
        else:
            _check_slide(f"runs[{group}]", decoded, wire.sliding, start, end, layout.first_wanted(group, end))
        _check_slots(f"runs[{group}]", decoded, num_pages[group] * paging.entries)
        found.append(decoded)
    return PositionMap(start, tuple(found), wire.sliding, tuple(paging.every for paging in layout.paging))


def _decode_group(field: str, data: bytes, expected: int) -> SlotRuns:
    """expected: how many positions it must hold, or entries for several each."""
    try:
        runs = decode_runs(data, max_tokens=expected)
    except InvalidPositionMap as error:
        raise InvalidPositionMap(f"{field}: {error}") from error
    if runs.num_tokens != expected:
        raise InvalidPositionMap(f"{field} holds {runs.num_tokens} positions; {expected} are expected")
    return runs


def _check_skips(field: str, runs: SlotRuns, skipped: int) -> None:
    skips = runs.begins == SKIP
    if runs.num_skipped != skipped or np.count_nonzero(skips) != int(skipped > 0):
        count = int(runs.lengths[skips].sum())
        raise InvalidPositionMap(f"{field} skips {count} positions; it must skip the first {skipped} and no others")


def _check_tail(field: str, runs: SlotRuns, wanted: int) -> None:
    """Checks that all but the first `wanted` positions are skipped."""
    skips = np.repeat(runs.begins == SKIP, runs.lengths)
    if skips[:wanted].any() or not skips[wanted:].all():
        raise InvalidPositionMap(
            f"{field} skips {int(skips.sum())} positions; it must have the first {wanted}, and skip all others"
        )


def _check_slide(field: str, runs: SlotRuns, sliding: Sliding, begin: int, end: int, seen: int) -> None:
    """seen: the first position that the span of the layer group shows at `end`."""
    window, sink = sliding.window, sliding.sink
    if not 0 <= sink < window:
        raise InvalidPositionMap(
            f"sliding has a sink of {sink}; it must be from 0 to {window - 1}, less than the window"
        )
    skips = (runs.begins == SKIP).nonzero()[0]
    firsts = begin + np.cumsum(runs.lengths, dtype=np.int64) - runs.lengths
    for index in skips.tolist():
        first, last = max(int(firsts[index]), seen), int(firsts[index] + runs.lengths[index]) - 1
        if first <= last and (first < sink or last >= end - (window - sink)):
            raise InvalidPositionMap(
                f"{field} skips positions {first} … {last}; a window of {window} behind {sink} lets go of {sink} … "
                f"{end - (window - sink) - 1} only"
            )


def _check_slots(field: str, runs: SlotRuns, num_slots: int) -> None:
    wanted = runs.begins != SKIP
    begins = runs.begins[wanted].astype(np.int64)
    if not begins.size:
        return
    ends = begins + runs.lengths[wanted]
    last = int(ends.max()) - 1
    if last >= num_slots:
        raise InvalidPositionMap(f"{field} holds slots {int(begins.min())} … {last}; the pool has 0 … {num_slots - 1}")
    order = begins.argsort()
    begins, ends = begins[order], ends[order]
    overlaps = (begins[1:] < ends[:-1]).nonzero()[0]
    if overlaps.size:
        raise InvalidPositionMap(f"{field} holds slot {int(begins[1:][overlaps[0]])} twice; slots must be distinct")
