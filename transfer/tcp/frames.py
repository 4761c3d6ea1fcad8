"""The frames that connections carry: headers, lists of places, and the bytes that go there. Numbers are little-endian.

data connection     header   kind, group, layer, count
                        places   pages: count × (page, how many)   slots, tokens: count × slot
                        bytes    of whole pages; of slots in all layers; of tokens' K, then V, in one layer
    signal connection   kind, row, signal, payload, counts of frames on each data connection, count of posts

No frame says how long it is: that follows from its kind, its places and the layout, which both sides have checked.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.layout import KVLayout
from tandem.transfer.copy_plan import CopyPlan
from tandem.transfer.errors import TransportError
from tandem.transfer.regions import Region, Regions

DATA_CONNECTIONS = 4  # from each PE to each other, plus one for signals
FRAME_BYTES = 2 << 20  # of pages; longer pushes are cut, and go over all connections
STAGED_BYTES = 1 << 20  # of slots and tokens, which the receiver sorts into its pages from a buffer
MAX_COUNT = 1 << 14  # places in a frame

HEADER = struct.Struct("<BxHII")
SIGNAL = struct.Struct(f"<BxxxIqq{DATA_CONNECTIONS + 1}Q")
FramePart = bytes | memoryview


class Kind(IntEnum):
    PAGES = 1
    SLOTS = 2
    TOKENS = 3
    POST = 4  # to be applied once as many frames have landed
    LANDED = 5  # how many frames and posts of the other side have


@dataclass(frozen=True, eq=False)
class Frame:
    """parts: header, places, bytes. staged: bytes among them that are held for this frame only."""

    parts: list[FramePart]
    num_bytes: int
    staged: int = 0


@dataclass(frozen=True)
class Header:
    kind: Kind
    group: int
    layer: int
    count: int

    @property
    def place_bytes(self) -> int:
        return self.count * (8 if self.kind == Kind.PAGES else 4)


@dataclass(frozen=True)
class SignalFrame:
    kind: Kind
    row: int
    signal: int
    payload: int
    counts: tuple[int, ...]  # of each data connection, then of posts

    def pack(self) -> bytes:
        return SIGNAL.pack(self.kind, self.row, self.signal, self.payload, *self.counts)


def pages_frames(plan: CopyPlan, group: int, page_bytes: int, pool: memoryview) -> Iterator[Frame]:
    """The whole pages of a plan, read from `pool`, the group's bytes, when they are sent."""
    most = max(1, FRAME_BYTES // page_bytes)
    runs: list[tuple[int, int, int]] = []
    length = 0
    planned = (array.tolist() for array in (plan.source_pages, plan.target_pages, plan.num_pages))
    for source, target, count in zip(*planned, strict=True):
        done = 0
        while done < count:
            part = min(count - done, most - length)
            runs.append((source + done, target + done, part))
            done, length = done + part, length + part
            if length == most or len(runs) == MAX_COUNT:
                yield _pages_frame(runs, group, page_bytes, pool)
                runs, length = [], 0
    if runs:
        yield _pages_frame(runs, group, page_bytes, pool)


def _pages_frame(runs: list[tuple[int, int, int]], group: int, page_bytes: int, pool: memoryview) -> Frame:
    places = np.array([run[1:] for run in runs], "<i4").tobytes()
    parts: list[FramePart] = [HEADER.pack(Kind.PAGES, group, 0, len(runs)) + places]
    parts += [pool[source * page_bytes : (source + count) * page_bytes] for source, _, count in runs]
    return Frame(parts, sum(map(len, parts)))


def staged_frame(kind: Kind, group: int, layer: int, slots: Int32Array, values: list[memoryview]) -> Frame:
    """Makes a frame of slots or tokens, whose bytes are the frame's own."""
    head = HEADER.pack(kind, group, layer, slots.size) + slots.astype("<i4").tobytes()
    num_bytes = len(head) + sum(map(len, values))
    return Frame([head, *values], num_bytes, num_bytes)


def staged_count(entry_bytes: int) -> int:
    """How many slots or tokens of so many bytes a frame takes at most."""
    return min(MAX_COUNT, max(1, STAGED_BYTES // entry_bytes))


def read_header(data: bytes, layout: KVLayout, regions: Regions | None = None) -> Header:
    """Reads a header. TransportError unless a PE of this layout could have sent it. regions: the parts that pages
    here share with pages of a PE of another shard."""
    number, group, layer, count = HEADER.unpack(data)
    if number not in (Kind.PAGES, Kind.SLOTS, Kind.TOKENS):
        raise TransportError(f"a frame has kind {number}; it must be one of pages, slots and tokens")
    if group >= len(layout.groups) or layer >= len(layout.groups[group].layers):
        raise TransportError(f"a frame is for layer {layer} of group {group}, which the layout does not have")
    kind = Kind(number)
    region = None if regions is None else regions[group]
    if region is not None and (kind == Kind.PAGES or (kind == Kind.TOKENS and region.peer_layer(layer) is None)):
        raise TransportError(f"a frame of {kind.name.lower()} is for layer {layer} of group {group}, of another shard")
    if region is not None and region.is_empty:
        raise TransportError(f"a frame is for group {group}, of which the sender's shard has nothing")
    most = MAX_COUNT if kind == Kind.PAGES else staged_count(entry_bytes(layout, kind, group, region))
    if not 1 <= count <= most:
        raise TransportError(f"a frame of {kind.name.lower()} has {count} places; it must have from 1 to {most}")
    return Header(kind, group, layer, count)


def read_signal(data: bytes, num_signals: int) -> SignalFrame:
    """Reads a signal. TransportError unless a PE could have sent it."""
    number, row, signal, payload, *counts = SIGNAL.unpack(data)
    if number not in (Kind.POST, Kind.LANDED):
        raise TransportError(f"a signal frame has kind {number}; it must be one of post and landed")
    if row >= num_signals:
        raise TransportError(f"a signal frame has row {row}; it must be from 0 to {num_signals - 1}")
    return SignalFrame(Kind(number), row, signal, payload, tuple(counts))


def entry_bytes(layout: KVLayout, kind: Kind, group: int, region: Region | None = None) -> int:
    """Returns the bytes of a slot in all layers, or of a token in one layer; with a region, only of its part."""
    of = layout.groups[group]
    layers, heads = len(of.layers), of.num_kv_heads
    one = layout.entry_bytes(group) // (layers * heads)
    if region is not None:
        layers, heads, row = region.num_layers, region.num_heads, layout.page_shape(group)[-1]
        one = one // row * region.count_numbers(row)
    return one * heads * (layers if kind == Kind.SLOTS else 1)
