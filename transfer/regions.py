"""Finds what pages of unlike shards of a model have in common: the layers, heads and numbers that both hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from tandem.cache.plan.errors import InvalidArgument

if TYPE_CHECKING:  # as in wire_map
    from tandem.cache.plan.kind import LayerGroup
    from tandem.cache.plan.kv_scales import KVScales
    from tandem.cache.plan.layout import KVLayout


ALL_OF_THEM = slice(None)


@dataclass(frozen=True)
class Region:
    """Layers and heads of a page of one PE, and where they stand in a peer's page of the same group: as many each.

    numbers: the numbers of a head that both hold, in slices; see Kind.held.
    """

    layers: slice
    heads: slice
    peer_layers: slice
    peer_heads: slice
    numbers: tuple[slice, ...] = (ALL_OF_THEM,)
    peer_numbers: tuple[slice, ...] = (ALL_OF_THEM,)

    @property
    def num_layers(self) -> int:
        return self.layers.stop - self.layers.start

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    def count_numbers(self, of_head: int) -> int:
        """Counts the numbers of a head that are in the region."""
        return sum(len(range(of_head)[numbers]) for numbers in self.numbers)

    @property
    def is_empty(self) -> bool:
        return self.num_layers == 0 or self.num_heads == 0

    @property
    def reversed(self) -> "Region":
        """The region as the peer sees it."""
        return Region(self.peer_layers, self.peer_heads, self.layers, self.heads, self.peer_numbers, self.numbers)

    def peer_layer(self, layer: int) -> int | None:
        """Returns the index of an own layer in the peer's group; None where the peer does not hold it."""
        if self.is_empty or not self.layers.start <= layer < self.layers.stop:
            return None
        return layer - self.layers.start + self.peer_layers.start


EMPTY = Region(slice(0, 0), slice(0, 0), slice(0, 0), slice(0, 0))
Regions = list[Region | None]
"""The regions of each layer group; None where both sides' pages are alike as a whole."""


def regions_between(own: "KVLayout", peer: "KVLayout") -> Regions:
    """Returns the regions of each group. InvalidArgument unless both are shards of one layout."""
    if own == peer:
        return [None] * len(own.groups)
    _check_alike(own, peer)
    regions: Regions = [_region(own, peer, group) for group in range(len(own.groups))]
    if own.scales is not None and peer.scales is not None:
        _check_scales(own, peer, regions, own.scales, peer.scales)
    return regions


def _check_alike(own: "KVLayout", peer: "KVLayout") -> None:
    pairs: list[tuple[str, object, object]] = [
        (name, getattr(own, name), getattr(peer, name)) for name in ("page_size", "dtype", "stored_dtype", "readers")
    ]
    pairs.append(("number of layer groups", len(own.groups), len(peer.groups)))
    for index, groups in enumerate(zip(own.groups, peer.groups, strict=False)):
        kinds = [
            vars(group.kind.whole(layout.shard))
            | {"kind": type(group.kind).__name__, "num_kv_heads": None, "replicas": None}
            for layout, group in zip((own, peer), groups, strict=True)
        ]
        for name in sorted(kinds[0] | kinds[1]):
            pairs.append((f"{name} of group {index}", kinds[0].get(name), kinds[1].get(name)))
        pairs.append(
            (f"KV heads of group {index}, of all ranks,", _num_heads(own, groups[0]), _num_heads(peer, groups[1]))
        )
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise InvalidArgument(f"{name} is {theirs} at the peer; it must be {mine}, for shards of one layout")


def _num_heads(layout: "KVLayout", group: "LayerGroup") -> int:
    """Returns the number of all ranks' heads. Each rank holds all of a latent, and some numbers of the only head of a
    state."""
    divides_heads = not (group.kind.whole_on_ranks or group.kind.held(layout.shard))
    return group.num_kv_heads * (layout.shard.size // group.kind.replicas if divides_heads else 1)


def _region(own: "KVLayout", peer: "KVLayout", group: int) -> Region:
    mine, theirs = (
        [layout.shard.first_layer + layer for layer in layout.groups[group].layers] for layout in (own, peer)
    )
    elsewhere = {peer.shard.first_layer + layer for layer in range(peer.num_layers)}.difference(theirs)
    misplaced = [layer for layer in mine if layer in elsewhere]
    if misplaced:
        raise InvalidArgument(f"layer {misplaced[0]} stands in group {group} here, and in another at the peer")
    common = [layer for layer in mine if layer in theirs]
    heads, peer_heads = _common_heads(own, peer, group)
    numbers = _common_numbers(own, peer, group)
    if not common or heads.stop <= heads.start or not numbers:
        return EMPTY
    begin, peer_begin = mine.index(common[0]), theirs.index(common[0])
    if mine[begin : begin + len(common)] != common or theirs[peer_begin : peer_begin + len(common)] != common:
        raise InvalidArgument(f"group {group} holds layers {mine} here and {theirs} at the peer, in unlike order")
    layers, peer_layers = (slice(first, first + len(common)) for first in (begin, peer_begin))
    return Region(layers, heads, peer_layers, peer_heads, *zip(*numbers, strict=True))


def _common_numbers(own: "KVLayout", peer: "KVLayout", group: int) -> list[tuple[slice, slice]]:
    """Slices of a head's numbers here and at the peer, in the same order on both sides. Two ranks that share a key head
    and no state exchange nothing: its numbers come from the ranks that send the states."""
    mine, theirs = (layout.groups[group].kind.held(layout.shard) for layout in (own, peer))
    if not mine:
        return [(ALL_OF_THEM, ALL_OF_THEM)]
    found, has_heads = dict[int, tuple[slice, slice]](), False
    for here, there in product(mine, theirs):
        begin = max(here.whole, there.whole)
        end = min(here.whole + here.count, there.whole + there.count)
        if begin < end:
            places = ((one.begin - one.whole + begin, one.begin - one.whole + end) for one in (here, there))
            number, peer_number = (slice(*place) for place in places)
            found[begin] = number, peer_number
            has_heads |= here.sharers == there.sharers == 1
    return [found[begin] for begin in sorted(found)] if has_heads else []


def _common_heads(own: "KVLayout", peer: "KVLayout", group: int) -> tuple[slice, slice]:
    if own.groups[group].kind.held(own.shard):  # one head, of which each rank has some numbers
        return slice(0, 1), slice(0, 1)
    mine, theirs = (_first_head(layout, layout.groups[group]) for layout in (own, peer))
    begin = max(mine, theirs)
    end = min(mine + own.groups[group].num_kv_heads, theirs + peer.groups[group].num_kv_heads)
    return slice(begin - mine, end - mine), slice(begin - theirs, end - theirs)


def _first_head(layout: "KVLayout", group: "LayerGroup") -> int:
    """Returns the index of the rank's first KV head among all ranks' heads."""
    return 0 if group.kind.whole_on_ranks else layout.shard.rank // group.kind.replicas * group.num_kv_heads


def _check_scales(
    own: "KVLayout", peer: "KVLayout", regions: Sequence[Region | None], mine: "KVScales", their: "KVScales"
) -> None:
    """InvalidArgument unless both store the layers and heads that they share alike."""
    for group, region in enumerate(regions):
        if region is None or region.is_empty:
            continue
        of_own, of_peer = own.groups[group], peer.groups[group]
        pairs = zip(of_own.layers[region.layers], of_peer.layers[region.peer_layers], strict=True)
        for layer, peer_layer in pairs:
            for name in ("k", "v"):
                here, there = getattr(mine, name)[layer], getattr(their, name)[peer_layer]
                held = _of_heads(here, of_own)[region.heads], _of_heads(there, of_peer)[region.peer_heads]
                if held[0] != held[1]:
                    raise InvalidArgument(
                        f"{name} scales of layer {own.shard.first_layer + layer} are {held[1]} at the peer; they must "
                        f"be {held[0]}"
                    )


def _of_heads(scales: tuple[float, ...], group: "LayerGroup") -> tuple[float, ...]:
    return scales * group.num_kv_heads if len(scales) == 1 else scales
