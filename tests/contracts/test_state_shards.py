"""States go between ranks of unlike numbers by every transport: each gets those of its heads, and of heads that serve
them, and nothing else is written."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.recurrent import StateShape
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.shard import WHOLE, Shard
from tandem.transfer.membership import TransportConfig
from tandem.transfer.rank_transport import Writers
from tandem.transfer.regions import regions_between
from tests.contracts.islands import ISLANDS, NUM_PAGES
from tests.support.state_parts import DELTA, SSD, layout_of, part_of_pools
from tests.transfer.layouts import PAGE_SIZE

RULES = {"delta": DELTA, "ssd": SSD}
SIDES = [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4)]


def shards(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


def draw(shape: StateShape, seed: int) -> list[Tensor]:
    """Draws pools of the whole model."""
    layout, generator = layout_of(shape, WHOLE, PAGE_SIZE), torch.Generator().manual_seed(seed)
    return [torch.randn(NUM_PAGES, *layout.page_shape(group), generator=generator) for group in range(2)]


@pytest.mark.parametrize("name", ISLANDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("senders", "receivers"), SIDES)
def test_each_rank_gets_the_states_of_its_heads(senders: int, receivers: int, rule: str, name: str) -> None:
    """Two heads serve eight, so two of four ranks share each serving head."""
    shape, before, whole = RULES[rule], draw(RULES[rule], 1), draw(RULES[rule], 2)
    ranks = [*shards(senders), *shards(receivers)]
    layouts = tuple(layout_of(shape, rank, PAGE_SIZE) for rank in ranks)
    config = TransportConfig(0, len(ranks), layouts[0], (NUM_PAGES,) * 2, 2, "states", 1, layouts=layouts)
    island = ISLANDS[name](config)
    try:
        handles = [transport.open() for transport in island]
        for transport in island:
            transport.join(handles)
        for pe, transport in enumerate(island):
            held = part_of_pools(whole if pe < senders else before, shape, ranks[pe])
            for pool, part in zip(transport.pools, held, strict=True):
                pool.copy_(part)
        source, target = np.array([3, 4, 7], np.int32), np.array([8, 9, 0], np.int32)
        for sender in range(senders):
            for receiver in range(senders, len(ranks)):
                island[sender].write_slots(receiver, 1, source, target)
                island[sender].quiet(receiver)
        before[1][target.tolist()] = whole[1][source.tolist()]
        for receiver in range(senders, len(ranks)):
            due = part_of_pools(before, shape, ranks[receiver])
            for pool, part in zip(island[receiver].pools, due, strict=True):
                assert torch.equal(pool, part)
    finally:
        for transport in island:
            transport.close()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("senders", "receivers"), [*SIDES, (4, 4)])
def test_a_rank_is_written_by_those_with_its_heads(senders: int, receivers: int, rule: str) -> None:
    """A rank that shares no more than a serving head with it does not write."""
    sides = [[layout_of(RULES[rule], rank, PAGE_SIZE) for rank in shards(size)] for size in (senders, receivers)]
    writers = Writers(*sides)
    for receiver in range(receivers):
        heads = {head * senders // 8 for head in range(8) if head * receivers // 8 == receiver}
        assert writers.sources(receiver) == sorted(heads)


def test_states_of_other_models_are_refused() -> None:
    own = layout_of(DELTA, WHOLE, PAGE_SIZE)
    for shape, message in (
        (replace(DELTA, value_heads=12), "shape of group 1 is DeltaShape.*value_heads=12.* at the peer; .*heads=8"),
        (SSD, r"shape of group 1 is SsdShape\("),
    ):
        with pytest.raises(InvalidArgument, match=message):
            regions_between(own, layout_of(shape, Shard(1, 2), PAGE_SIZE))


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        (DELTA, 3, "key_heads of recurrent layers is 2; it must be a multiple or a divisor of the 3 ranks"),
        (
            replace(DELTA, value_heads=6),
            4,
            "value_heads of recurrent layers is 6; it must be a multiple of the 4 ranks",
        ),
        (replace(SSD, num_heads=6), 4, "num_heads of recurrent layers is 6; it must be a multiple of the 4 ranks"),
        (SSD, 3, "groups of recurrent layers is 2; it must be a multiple or a divisor of the 3 ranks"),
    ],
)
def test_heads_that_ranks_cannot_divide_are_named(shape: StateShape, size: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        shape.divided(Shard(0, size))
