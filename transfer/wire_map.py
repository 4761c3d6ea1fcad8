"""A position map as the control plane carries it."""

from dataclasses import dataclass

from tandem.cache.layout import KVLayout
from tandem.cache.position_map import PositionMap, SlotRuns
from tandem.transfer.codec import decode_runs, encode_runs
from tandem.transfer.errors import InvalidPositionMap
from tandem.transfer.validation import validate_map


@dataclass(frozen=True)
class WireMap:
    """The fields of tandem.v1.PositionMap under the same names. Nothing in it has been checked."""

    start_position: int
    num_tokens: int
    page_size: int
    runs: tuple[bytes, ...]
    layout_fingerprint: int


def encode_map(position_map: PositionMap, layout: KVLayout) -> WireMap:
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
    wire: WireMap, layout: KVLayout, *, num_pages: tuple[int, ...], expected_start: int, expected_tokens: int
) -> PositionMap:
    """The map that `wire` stands for, wholly validated; InvalidPositionMap says what is wrong.

    num_pages: per layer group, pages in the receiver's pool; expected_start, expected_tokens: the positions that the
    caller knows the map must cover.
    """
    if wire.page_size != layout.page_size:
        raise InvalidPositionMap(f"page_size is {wire.page_size}; this worker's is {layout.page_size}")
    if wire.layout_fingerprint != layout.fingerprint:
        raise InvalidPositionMap(
            f"layout_fingerprint is {wire.layout_fingerprint:#018x}; this worker's is {layout.fingerprint:#018x}"
        )
    if wire.num_tokens != expected_tokens:
        raise InvalidPositionMap(f"num_tokens is {wire.num_tokens}; {expected_tokens} is expected")
    if wire.start_position != expected_start:
        raise InvalidPositionMap(f"start_position is {wire.start_position}; {expected_start} is expected")
    if len(wire.runs) != len(layout.groups):
        raise InvalidPositionMap(f"runs holds {len(wire.runs)} layer groups; the layout has {len(layout.groups)}")
    runs = tuple(_decode_group(group, data, expected_tokens) for group, data in enumerate(wire.runs))
    for group, decoded in enumerate(runs):
        if decoded.num_tokens != expected_tokens:
            raise InvalidPositionMap(
                f"runs[{group}] holds {decoded.num_tokens} positions; {expected_tokens} are expected"
            )
    position_map = PositionMap(wire.start_position, runs)
    validate_map(
        position_map, layout, num_pages=num_pages, expected_start=expected_start, expected_tokens=expected_tokens
    )
    return position_map


def _decode_group(group: int, data: bytes, expected_tokens: int) -> SlotRuns:
    try:
        return decode_runs(data, max_tokens=expected_tokens)
    except InvalidPositionMap as error:
        raise InvalidPositionMap(f"runs[{group}]: {error}") from error
