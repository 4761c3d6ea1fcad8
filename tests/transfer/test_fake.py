"""Checks what the fake adds to the contract: late and unordered writes, and faults on request."""

import numpy as np
import pytest
import torch

from tandem.cache.plan.arrays import Int32Array
from tandem.transfer.errors import TransportClosed, TransportError, TransportTimeout
from tests.support.fake_transport import FakeFabric, FakeTransport
from tests.transfer.layouts import PAGE_SIZE, two_groups

NUM_PAGES = 16
ALL = np.arange(NUM_PAGES * PAGE_SIZE, dtype=np.int32)


def fabric(num_pes: int = 2, seed: int = 0) -> FakeFabric:
    return FakeFabric(num_pes, two_groups(), num_pages=NUM_PAGES, seed=seed)


def landed_pages(transport: FakeTransport) -> list[int]:
    return [page for page in range(NUM_PAGES) if bool((transport.pools[0][page] == 1).all())]


def push_ones(sender: FakeTransport, pe: int, slots: Int32Array = ALL) -> None:
    sender.pools[0].fill_(1)
    sender.write_slots(pe, 0, slots, slots)


def test_nothing_lands_before_a_fence_is_asked_and_the_source_is_read_then() -> None:
    sender, receiver = fabric().joined()
    push_ones(sender, 1)
    fence = sender.fence(1)
    assert not receiver.pools[0].any()
    sender.pools[0].fill_(3)
    assert fence.is_quiet()
    assert bool((receiver.pools[0] == 3).all())


def test_what_is_issued_behind_a_fence_does_not_land_with_it() -> None:
    sender, receiver = fabric().joined()
    push_ones(sender, 1, ALL[:PAGE_SIZE])
    fence = sender.fence(1)
    push_ones(sender, 1, ALL[-PAGE_SIZE:])
    assert fence.is_quiet()
    assert landed_pages(receiver) == [0]


def test_a_post_lands_behind_the_writes_before_it() -> None:
    island = fabric()
    sender, receiver = island.joined()
    push_ones(sender, 1, ALL[:PAGE_SIZE])
    sender.post(1, 0, 5, 6)
    assert landed_pages(receiver) == [0]
    island.hold(1)
    push_ones(sender, 1, ALL[PAGE_SIZE : 2 * PAGE_SIZE])
    sender.post(1, 0, 7, 8)
    push_ones(sender, 1, ALL[-PAGE_SIZE:])
    assert receiver.mailbox()[0].tolist() == [5, 6]
    island.release(1)
    assert landed_pages(receiver) == [0, 1]
    assert receiver.mailbox()[0].tolist() == [7, 8]


def test_quiet_waits_for_the_own_writes_to_that_pe_only() -> None:
    left, right, receiver = fabric(3).joined()
    push_ones(left, 2, ALL[:PAGE_SIZE])
    push_ones(right, 2, ALL[-PAGE_SIZE:])
    left.quiet(1)
    assert landed_pages(receiver) == []
    left.quiet(2)
    assert landed_pages(receiver) == [0]


def test_writes_land_in_an_order_drawn_from_the_seed() -> None:
    seen = []
    for seed in (1, 1, 2):
        island = fabric(seed=seed)
        sender, receiver = island.joined()
        push_ones(sender, 1)
        assert island.deliver(1, num_writes=6) == NUM_PAGES
        seen.append(landed_pages(receiver))
        assert len(seen[-1]) == 6
    assert seen[0] == seen[1] != seen[2]
    assert seen[0] != list(range(6))


def test_hold_lets_nothing_land_and_release_ends_it() -> None:
    island = fabric()
    sender, receiver = island.joined()
    island.hold(1)
    push_ones(sender, 1)
    sender.post(1, 0, 5, 6)
    fence = sender.fence(1)
    assert not fence.is_quiet()
    with pytest.raises(TransportTimeout, match="from PE 0 to PE 1 took more than 0 s; they may still land"):
        sender.quiet(1)
    assert not receiver.mailbox().any()
    assert not receiver.pools[0].any()
    island.release(1)
    assert receiver.mailbox()[0].tolist() == [5, 6]
    assert fence.is_quiet()
    assert landed_pages(receiver) == list(range(NUM_PAGES))


@pytest.mark.parametrize("call", ["write_tokens", "write_slots", "fence", "is_quiet", "post"])
def test_fail_next_fails_one_call(call: str) -> None:
    island = fabric()
    sender, _ = island.joined()
    rows = torch.ones(1, 2, 8)
    index = torch.zeros(1, dtype=torch.int64)
    fence = sender.fence(1)
    calls = {
        "write_tokens": lambda: sender.write_tokens(1, 0, 0, rows, rows, index, index),
        "write_slots": lambda: sender.write_slots(1, 0, ALL, ALL),
        "fence": lambda: sender.fence(1),
        "is_quiet": fence.is_quiet,
        "post": lambda: sender.post(1, 0, 1, 1),
    }
    island.fail_next(call, 1)
    with pytest.raises(TransportError, match=f"{call} to PE 1 was made to fail"):
        calls[call]()
    calls[call]()
    with pytest.raises(ValueError, match="call is 'join'"):
        island.fail_next("join", 1)


def test_a_killed_sender_leaves_some_of_its_writes() -> None:
    counts = set()
    for seed in range(10):
        island = fabric(seed=seed)
        sender, receiver = island.joined()
        push_ones(sender, 1)
        island.kill(0)
        counts.add(len(landed_pages(receiver)))
        assert island.deliver(1) == 0
        with pytest.raises(TransportClosed, match="PE 0 was killed"):
            sender.quiet(1)
    assert len(counts) > 3


def test_writes_to_a_killed_pe_go_nowhere_without_an_error() -> None:
    island = fabric()
    sender, receiver = island.joined()
    island.kill(1)
    push_ones(sender, 1)
    sender.quiet(1)
    sender.post(1, 0, 5, 6)
    assert not receiver.pools[0].any()
