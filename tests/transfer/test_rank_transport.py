"""Checks which rank writes which heads between workers of unlike ranks, against a naive count, and when a signal
counts."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.shard import Shard
from tandem.transfer.membership import TransportConfig
from tandem.transfer.rank_transport import RankTransport, Writers, config_below, lanes_of
from tandem.transfer.recall import mailbox_rows
from tandem.transfer.shared_memory import SharedMemoryTransport

PAGE, HEADS, LAYERS = 4, 4, 2
SIZES = (1, 2, 4, 8)


@cache
def layouts_of(size: int) -> tuple[KVLayout, ...]:
    """Returns the layout of each rank: a group of HEADS heads, and a group of latents."""
    found = []
    for rank in range(size):
        shard = Shard(rank, size)
        kind = KV(len(shard.kv_heads("heads", HEADS)), 8, replicas=shard.replicas("heads", HEADS))
        groups = LayerGroup(tuple(range(LAYERS)), kind), LayerGroup((LAYERS,), Latent(16, 8))
        found.append(KVLayout(groups, PAGE, torch.float32, None, shard))
    return tuple(found)


def heads_of(layout: KVLayout) -> range:
    return layout.shard.kv_heads("heads", HEADS)


@pytest.mark.parametrize(("own", "peer"), list(product(SIZES, SIZES)))
def test_each_head_of_each_rank_is_written_once(own: int, peer: int) -> None:
    writers = Writers(layouts_of(own), layouts_of(peer))
    for target, theirs in enumerate(layouts_of(peer)):
        written = [
            head
            for rank, mine in enumerate(layouts_of(own))
            if target in writers.targets(rank, 0)
            for head in heads_of(mine)
            if head in heads_of(theirs)
        ]
        assert sorted(written) == list(heads_of(theirs))
        assert sum(target in writers.targets(rank, 1) for rank in range(own)) == 1, "a latent is whole on each rank"
        both = {rank for group in range(2) for rank in range(own) if target in writers.targets(rank, group)}
        assert writers.sources(target) == sorted(both)


def test_ranks_that_hold_the_same_take_turns() -> None:
    writers = Writers(layouts_of(4), layouts_of(2))
    assert [writers.targets(rank, 1) for rank in range(4)] == [[0], [1], [], []]
    assert [Writers(layouts_of(8), layouts_of(8)).targets(rank, 0) for rank in range(8)] == [
        [rank] for rank in range(8)
    ]


class Ranks:
    """All ranks of two workers, over shared memory in this process."""

    def __init__(self, own: int, peer: int, rows: int = 3) -> None:
        workers = [layouts_of(own), layouts_of(peer)]
        below, self.ranks = [], list[list[RankTransport]]()
        for worker, layouts in enumerate(workers):
            for rank, layout in enumerate(layouts):
                signals = mailbox_rows(rows, 2)
                config = TransportConfig(worker, 2, layout, (8, 8), signals, "island", 1)
                below.append(SharedMemoryTransport(config_below(config, workers, rank)))
        at = iter(below)
        signals = mailbox_rows(rows, 2)
        for worker, layouts in enumerate(workers):
            self.ranks.append([RankTransport(next(at), workers, worker, signals) for _ in layouts])
        handles = [one.open() for ranks in self.ranks for one in ranks]
        for ranks in self.ranks:
            for one in ranks:
                one.join(handles)

    def close(self) -> None:
        for ranks in self.ranks:
            for one in ranks:
                one.close()


@pytest.mark.parametrize(("own", "peer"), list(product(SIZES[:3], SIZES[:3])))
def test_pages_land_where_they_belong_and_signals_count_once_all_have_come(own: int, peer: int) -> None:
    island = Ranks(own, peer)
    whole = torch.randn(8, LAYERS, 2, HEADS, PAGE, 8)
    for one in island.ranks[0]:
        held = heads_of(one.layout)
        one.pools[0].copy_(whole[:, :, :, held.start : held.stop])
    source = np.arange(2 * PAGE, dtype=np.int32)
    target = source + 3 * PAGE
    signal = 5 << 40 | 17
    for one in island.ranks[0]:
        one.write_slots(1, 0, source, target)
        one.post(1, 1, signal, 42)
    for receiver in island.ranks[1]:
        held = heads_of(receiver.layout)
        assert torch.equal(receiver.pools[0][3:5], whole[:2, :, :, held.start : held.stop])
        assert receiver.mailbox()[1].tolist() == [signal, 42]
        assert receiver.mailbox()[0, 0] == 0
        assert receiver.fence(0).is_quiet()
    island.close()


def test_a_signal_of_one_rank_alone_does_not_count() -> None:
    island = Ranks(4, 2)
    first, second = island.ranks[0][:2]
    receiver = island.ranks[1][0]
    assert lanes_of([layouts_of(4), layouts_of(2)]) == 3, "of heads from two, of latents from another"
    first.post(1, 0, 7 << 40 | 3, 9)
    assert receiver.mailbox()[0, 0] == 0
    second.post(1, 0, 6 << 40 | 3, 9)  # of an earlier use of the row
    assert receiver.mailbox()[0, 0] == 0
    second.post(1, 0, 7 << 40 | 3, 9)
    assert receiver.mailbox()[0].tolist() == [7 << 40 | 3, 9]
    island.close()


def test_ranks_of_a_worker_find_each_others_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedMemoryTransport, "scratch", lambda self, pe: 100 * self.config.scratch_bytes + pe)
    workers = [layouts_of(4), layouts_of(2)]
    config = TransportConfig(1, 2, workers[1][1], (8, 8), mailbox_rows(3, 2), "island", 1)
    below = SharedMemoryTransport(config_below(config, workers, 1, 7))
    second = RankTransport(below, workers, 1, mailbox_rows(3, 2))
    assert [second.rank_scratch(rank) for rank in range(2)] == [704, 705]


def test_recalls_go_to_the_first_rank_alone() -> None:
    island = Ranks(2, 2)
    island.ranks[0][0].post(1, 4, 123, 1)
    assert [int(one.mailbox()[4, 0]) for one in island.ranks[1]] == [123, 0]
    island.close()
