"""Pages and tokens go between shards of unlike sizes and stages, by every transport, and nothing else is written."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kinds.kv import KV
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.cache.plan.shard import WHOLE, HeadRun, Shard, map_heads
from tandem.transfer.errors import InvalidPositionMap, MembershipRefused
from tandem.transfer.membership import TransportConfig, make_handle, read_handles
from tandem.transfer.regions import Region, regions_between
from tandem.transfer.transport import Transport
from tandem.transfer.wire_map import decode_map, encode_map
from tests.contracts.islands import ISLANDS, NUM_PAGES
from tests.transfer.layouts import PAGE_SIZE

HEADS, LAYERS, WIDTHS = (8, 4), ((0, 2, 4, 5), (1, 3)), (8, 4)  # of the whole model, in two groups


def shard_of(rank: int, size: int, layers: range = range(6)) -> KVLayout:
    """Returns the layout with the heads of a rank, in a stage of the model."""
    groups = tuple(
        LayerGroup(tuple(layer - layers.start for layer in of if layer in layers), KV(heads // size, width))
        for of, heads, width in zip(LAYERS, HEADS, WIDTHS, strict=True)
    )
    return KVLayout(groups, PAGE_SIZE, torch.float32, shard=Shard(rank, size, layers.start))


def ranks(size: int) -> list[KVLayout]:
    return [shard_of(rank, size) for rank in range(size)]


STAGES = [shard_of(0, 1, range(2)), shard_of(0, 1, range(2, 6))]
CASES = {
    "4 ranks to 2": (ranks(4), ranks(2)),
    "2 ranks to 4": (ranks(2), ranks(4)),
    "stages to a whole": (STAGES, ranks(1)),
    "2 ranks to stages": (ranks(2), STAGES),
}
"""Layouts of senders, and of receivers."""
Make = Callable[[list[KVLayout]], list[Transport]]


@pytest.fixture(params=ISLANDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Transport] = []

    def island(layouts: list[KVLayout]) -> list[Transport]:
        made.extend(one := ISLANDS[request.param](config_of(layouts)))
        handles = [transport.open() for transport in one]
        for transport in one:
            transport.join(handles)
        return one

    yield island
    for transport in made:
        transport.close()


def config_of(layouts: list[KVLayout]) -> TransportConfig:
    """Makes the config of PE 0, with the regions that its pages share with all others."""
    config = TransportConfig(0, len(layouts), layouts[0], (NUM_PAGES,) * 2, 2, "shards", 1, layouts=tuple(layouts))
    assert len(config.regions) == len(layouts)
    return config


def part(whole: list[Tensor], layout: KVLayout, group: int) -> Tensor:
    """Returns a shard's part of the whole model's pools."""
    of, shard = layout.groups[group], layout.shard
    layers = [LAYERS[group].index(layer + shard.first_layer) for layer in of.layers]
    heads = slice(shard.rank * of.num_kv_heads, (shard.rank + 1) * of.num_kv_heads)
    return whole[group][:, layers][:, :, :, heads]


def draw(seed: int) -> list[Tensor]:
    """Draws pools of the whole model."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (NUM_PAGES, len(layers), 2, heads, PAGE_SIZE, width)
        for layers, heads, width in zip(LAYERS, HEADS, WIDTHS, strict=True)
    ]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("name", CASES)
def test_what_both_hold_lands_and_nothing_else(make: Make, name: str) -> None:
    """Each sender writes to each receiver; together they make the receivers' pages as if one whole had sent."""
    sending, receiving = CASES[name]
    layouts = [*sending, *receiving]
    island, receivers = make(layouts), range(len(sending), len(layouts))
    before, whole = draw(1), draw(2)
    for pe, transport in enumerate(island):
        for group, pool in enumerate(transport.pools):
            pool.copy_(part(before if pe in receivers else whole, layouts[pe], group))
    source = np.array([*range(4, 13), 20, 3], np.int32)  # whole pages and single slots
    target = np.array([*range(8, 17), 1, 40], np.int32)
    k, v = (torch.randn(5, max(HEADS), max(WIDTHS), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    indices, slots = torch.tensor([4, 0, 2]), torch.tensor([30, 47, 5], dtype=torch.int32)
    for sender, layout in enumerate(sending):
        for receiver in receivers:
            for group, of in enumerate(layout.groups):
                island[sender].write_slots(receiver, group, source, target)
                first, width = layout.shard.rank * of.num_kv_heads, WIDTHS[group]
                keys, values = (x[:, first : first + of.num_kv_heads, :width] for x in (k, v))
                for index, layer in enumerate(of.layers):
                    factor = layout.shard.first_layer + layer + 1
                    own = factor * keys, -factor * values
                    island[sender].write_tokens(receiver, group, index, *own, indices, slots)
            island[sender].quiet(receiver)
    for group, (layers, heads, width) in enumerate(zip(LAYERS, HEADS, WIDTHS, strict=True)):
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            rows = whole[group][s // PAGE_SIZE, :, :, :, s % PAGE_SIZE]
            before[group][t // PAGE_SIZE, :, :, :, t % PAGE_SIZE] = rows
        for index, slot in zip(indices.tolist(), slots.tolist(), strict=True):
            for number, layer in enumerate(layers):
                page = before[group][slot // PAGE_SIZE, number, :, :, slot % PAGE_SIZE]
                page[0], page[1] = (layer + 1) * k[index, :heads, :width], -(layer + 1) * v[index, :heads, :width]
    for receiver in receivers:
        for group, pool in enumerate(island[receiver].pools):
            assert torch.equal(pool, part(before, layouts[receiver], group))


def test_other_layouts_and_shards_are_refused() -> None:
    whole, half = shard_of(0, 1), shard_of(1, 2)
    for wrong, message in (
        (replace(half, page_size=8), "page_size is 8 at the peer; it must be 4"),
        (replace(half, dtype=torch.bfloat16), "dtype is torch.bfloat16 at the peer"),
        (replace(half, shard=WHOLE), "KV heads of group 0, of all ranks, is 4 at the peer; it must be 8"),
        (replace(half, shard=Shard(1, 2, 1)), "layer 2 stands in group 0 here, and in another at the peer"),
        (
            KVLayout((LayerGroup((0,), KV(8, 8)),), PAGE_SIZE, torch.float32),
            "number of layer groups is 1 at the peer; it must be 2",
        ),
    ):
        with pytest.raises(InvalidArgument, match=message):
            config_of([whole, wrong])
    scales = KVScales.uniform(6, 2.0), KVScales.uniform(6, 3.0)
    scaled = [replace(one, scales=of) for one, of in zip((whole, half), scales, strict=True)]
    with pytest.raises(InvalidArgument, match=r"k scales of layer 0 are \(3.0, .* at the peer; they must be \(2.0, "):
        config_of(scaled)
    assert config_of([replace(one, scales=scales[0]) for one in (whole, half)]).of(1).layout.shard == half.shard


def test_a_handle_of_another_shard_is_refused() -> None:
    first, second = (config_of([shard_of(0, 1), shard_of(rank, 2)]) for rank in range(2))
    handles = [make_handle("fake", first.of(pe), {}) for pe in range(2)]
    assert read_handles("fake", first, handles) == [{}, {}]
    with pytest.raises(MembershipRefused, match="PE 1's handle has layout_fingerprint"):
        read_handles("fake", second, handles)


def test_the_map_of_another_shard_is_read_where_it_is_expected() -> None:
    whole, half = shard_of(0, 1), shard_of(1, 2)
    wanted = PositionMap(0, (SlotRuns.from_slots([0, 1, 2]),) * 2)
    wire, expected = encode_map(wanted, half), {"num_pages": (4, 4), "expected_start": 0, "expected_tokens": 3}
    assert decode_map(wire, whole, receiver=half, **expected) == wanted
    for receiver, message in (
        (shard_of(0, 2), "layout_fingerprint is 0x.* is expected"),
        (replace(half, page_size=8), "layout_fingerprint: the receiver has another layout: page_size is 8"),
    ):
        with pytest.raises(InvalidPositionMap, match=message):
            decode_map(wire, whole, receiver=receiver, **expected)


@pytest.mark.parametrize(("own", "peers"), [(1, 4), (4, 1), (2, 4), (4, 2), (2, 2)])
def test_heads_are_mapped_as_regions_say(own: int, peers: int) -> None:
    """Compares the rule for one group, by numbers of heads alone, with the ranges of all pairs of ranks."""
    heads, peer_heads = 8 // own, 8 // peers
    for rank, layout in enumerate(ranks(own)):
        found = []
        for peer, theirs in enumerate(ranks(peers)):
            every = slice(0, heads)
            region = regions_between(layout, theirs)[0] or Region(every, every, every, every)
            if not region.is_empty:
                ranges = (range(one.start, one.stop) for one in (region.heads, region.peer_heads))
                found.append(HeadRun(10 + peer, *ranges))
        assert map_heads(rank, heads, peer_heads, first_pe=10) == tuple(found)
    with pytest.raises(InvalidArgument, match="num_heads is 3; it must be a multiple or a divisor of 8"):
        map_heads(0, 3, 8)
