"""Tests of what every transport does."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.page_writer import PageWriter
from tandem.transfer.completion import SignalBoard, pack_signal
from tandem.transfer.transport import Transport
from tests.contracts.islands import NUM_SLOTS, pages_of, random_tokens

Pools = list[Tensor]


def fill(transport: Transport, seed: int) -> Pools:
    """Fills all pools with random bits, and returns their contents."""
    generator = torch.Generator().manual_seed(seed)
    for pool in transport.pools:
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return [pool.clone() for pool in transport.pools]


def same_bits(pools: tuple[Tensor, ...], expected: Pools) -> bool:
    return all(
        torch.equal(pool.view(torch.uint8), want.view(torch.uint8)) for pool, want in zip(pools, expected, strict=True)
    )


def mailbox_with(transport: Transport, row: int, signal: int) -> Int64Array:
    """Returns the transport's mailbox, as soon as that signal stands in that row."""
    deadline = time.monotonic() + 20
    while int((mailbox := transport.mailbox())[row, 0]) != signal:
        assert time.monotonic() < deadline, "the signal did not come"
    return mailbox


def naive_slots(expected: Pools, group: int, source: Pools, source_slots: Int32Array, target_slots: Int32Array) -> None:
    size = source[group].shape[4]
    for s, t in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
        expected[group][t // size, :, :, :, t % size] = source[group][s // size, :, :, :, s % size]


def runs_of_slots(seed: int) -> tuple[Int32Array, Int32Array]:
    """Draws equally many source and target slots in runs of any alignment, all distinct."""
    rng = np.random.default_rng(seed)
    source = np.concatenate([np.arange(20, 37), np.arange(4, 16), np.arange(39, 41)])
    target = np.concatenate([np.arange(20, 37), np.arange(0, 12), np.arange(45, 47)])
    shuffled = rng.permutation(np.arange(12, 20))
    return np.append(source, rng.permutation(8)).astype(np.int32), np.append(target, shuffled).astype(np.int32)


def test_memory_begins_zeroed_and_in_the_shape_of_the_layout(island: list[Transport]) -> None:
    for transport in island:
        for group, (pool, pages) in enumerate(zip(transport.pools, pages_of(transport.layout), strict=True)):
            assert tuple(pool.shape) == (pages, *transport.layout.page_shape(group))
            assert pool.dtype == transport.layout.stored_dtype_of(group)
            assert not pool.any()
        assert transport.mailbox().shape == (4, 2)
        assert transport.mailbox().dtype == np.int64
        assert not transport.mailbox().any()


@pytest.mark.parametrize("target", [0, 1], ids=["self", "peer"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["slots32", "slots64"])
def test_tokens_land_bit_for_bit_and_nowhere_else(island: list[Transport], target: int, dtype: torch.dtype) -> None:
    before = {pe: fill(transport, pe) for pe, transport in enumerate(island)}
    indices = torch.tensor([6, 0, 3, 4, 5])
    slots = torch.tensor([0, 47, 17, 18, 30], dtype=dtype)
    for group, layer in ((0, 0), (0, 1), (1, 0)):
        k, v = random_tokens(island[0], group, 7, seed=10 * group + layer)
        island[0].write_tokens(target, group, layer, k, v, indices, slots)
        for index, slot in zip(indices.tolist(), slots.tolist(), strict=True):
            size = before[target][group].shape[4]
            page = before[target][group][slot // size]
            page[layer, 0, :, slot % size] = k[index]
            if v is not None:
                page[layer, 1, :, slot % size] = v[index]
        for source in (k, v):
            if source is not None:
                source.fill_(-9)  # it may be overwritten at once
    island[0].quiet(target)
    for pe, transport in enumerate(island):
        assert same_bits(transport.pools, before[pe])


@pytest.mark.parametrize("seed", range(4))
def test_slots_land_bit_for_bit_and_nowhere_else(island: list[Transport], seed: int) -> None:
    before = {pe: fill(transport, pe) for pe, transport in enumerate(island)}
    source_slots, target_slots = runs_of_slots(seed)
    for group in range(2):
        island[0].write_slots(1, group, source_slots, target_slots)
        naive_slots(before[1], group, before[0], source_slots, target_slots)
    island[0].quiet(1)
    for pe, transport in enumerate(island):
        assert same_bits(transport.pools, before[pe])


def test_slots_land_within_the_own_pools(island: list[Transport]) -> None:
    before = fill(island[1], 5)
    source, target = np.arange(0, 10, dtype=np.int32), np.arange(24, 34, dtype=np.int32)
    island[1].write_slots(1, 0, source, target)
    naive_slots(before, 0, [pool.clone() for pool in before], source, target)
    island[1].quiet(1)
    assert same_bits(island[1].pools, before)


def test_writes_of_no_slots_change_nothing(island: list[Transport]) -> None:
    before = fill(island[1], 1)
    none, k = np.empty(0, np.int32), random_tokens(island[0], 0, 3, seed=0)[0]
    island[0].write_slots(1, 0, none, none)
    island[0].write_tokens(1, 0, 0, k, k, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    island[0].quiet(1)
    assert same_bits(island[1].pools, before)


def test_a_signal_comes_with_its_payload_and_after_the_data(island: list[Transport]) -> None:
    board = SignalBoard(4)
    waiting = [board.acquire() for _ in range(2)]
    slots = np.array([signal.row for signal in waiting])
    generations = np.array([signal.generation for signal in waiting])
    source = fill(island[0], 3)
    everything = np.arange(NUM_SLOTS, dtype=np.int32)
    for group in range(2):
        island[0].write_slots(1, group, everything, everything)
    assert SignalBoard.landed(island[1].mailbox(), slots, generations).tolist() == [0, 0]
    signal = pack_signal(waiting[1].generation, NUM_SLOTS)
    island[0].post(1, waiting[1].row, signal, 2**40 + 5)
    mailbox = mailbox_with(island[1], waiting[1].row, signal)
    assert SignalBoard.landed(mailbox, slots, generations).tolist() == [0, NUM_SLOTS]
    assert int(mailbox[waiting[1].row, 1]) == 2**40 + 5
    assert same_bits(island[1].pools, source)
    assert not island[0].mailbox().any()
    assert not island[2].mailbox().any()


def test_a_payload_may_be_a_tensor(island: list[Transport]) -> None:
    word = torch.tensor([3, 2**31 + 7])
    island[0].post(1, 2, pack_signal(1, 1), word[1])
    word[1] = 0
    assert mailbox_with(island[1], 2, pack_signal(1, 1))[2].tolist() == [pack_signal(1, 1), 2**31 + 7]


def test_a_fence_is_quiet_once_what_came_before_it_has_landed(island: list[Transport]) -> None:
    source = fill(island[0], 3)
    everything = np.arange(NUM_SLOTS, dtype=np.int32)
    fences = []
    for group in range(2):
        island[0].write_slots(1, group, everything, everything)
        fences.append(island[0].fence(1))
    island[0].post(1, 3, pack_signal(1, NUM_SLOTS), 0)
    fences.append(island[0].fence(1))
    deadline = time.monotonic() + 10
    for group, fence in enumerate(fences):
        while not fence.is_quiet():
            assert time.monotonic() < deadline
        assert same_bits(island[1].pools[: group + 1], source[: group + 1])
    assert island[1].mailbox()[3].tolist() == [pack_signal(1, NUM_SLOTS), 0]
    assert all(fence.is_quiet() for fence in fences)


def test_a_fence_of_nothing_is_quiet(island: list[Transport]) -> None:
    island[0].quiet(1)
    assert island[0].fence(1).is_quiet()


def test_a_mailbox_is_a_copy(island: list[Transport]) -> None:
    island[0].mailbox()[:] = 3
    before = island[0].mailbox()
    island[0].post(0, 2, pack_signal(1, 1), -4)
    assert not before.any()
    assert island[0].mailbox()[2].tolist() == [pack_signal(1, 1), -4]


def test_a_signal_of_an_earlier_use_of_its_slot_counts_for_nothing(island: list[Transport]) -> None:
    board = SignalBoard(1)
    first = board.acquire()
    island[0].post(1, first.row, pack_signal(first.generation, 12), 1)
    board.release(first)
    second = board.acquire()
    slots, generations = np.array([second.row]), np.array([second.generation])
    stale = mailbox_with(island[1], first.row, pack_signal(first.generation, 12))
    assert SignalBoard.landed(stale, slots, generations).tolist() == [0]
    signal = pack_signal(second.generation, 7)
    island[0].post(1, second.row, signal, 2)
    assert SignalBoard.landed(mailbox_with(island[1], second.row, signal), slots, generations).tolist() == [7]


def test_two_senders_share_a_receiver(island: list[Transport]) -> None:
    expected = fill(island[1], 1)
    for pe, slots in ((0, np.arange(0, 22, dtype=np.int32)), (2, np.arange(22, 44, dtype=np.int32))):
        source = fill(island[pe], 10 + pe)
        for group in range(2):
            island[pe].write_slots(1, group, slots, slots)
            naive_slots(expected, group, source, slots, slots)
        island[pe].post(1, pe, pack_signal(1, 22), pe)
    island[0].quiet(1)
    island[2].quiet(1)
    assert same_bits(island[1].pools, expected)
    assert island[1].mailbox()[[0, 2], 1].tolist() == [0, 2]


def test_a_transport_serves_the_cache_as_page_writer(island: list[Transport]) -> None:
    writer: PageWriter = island[0]
    assert callable(writer.write_tokens)
    assert callable(writer.write_slots)


@pytest.mark.parametrize("slots", [[-1, 0], [0, NUM_SLOTS]])
def test_slots_outside_the_pools_are_refused(island: list[Transport], slots: list[int]) -> None:
    bad, good = np.array(slots, np.int32), np.array([2, 3], np.int32)
    with pytest.raises(
        InvalidArgument, match=rf"target_slots are {slots[0]} … {slots[1]}; they must be from 0 to {NUM_SLOTS - 1}"
    ):
        island[0].write_slots(1, 0, good, bad)
    with pytest.raises(InvalidArgument, match="source_slots are"):
        island[0].write_slots(1, 0, bad, good)
    k, v = random_tokens(island[0], 0, 2, seed=0)
    for layer in range(2):
        with pytest.raises(IndexError):
            island[0].write_tokens(1, 0, layer, k, v, torch.arange(2), torch.from_numpy(bad))


def test_pes_and_signal_rows_out_of_range_are_refused(island: list[Transport]) -> None:
    slots = np.arange(2, dtype=np.int32)
    k, v = random_tokens(island[0], 0, 2, seed=0)
    for pe in (-1, 3):
        for call in (
            lambda pe=pe: island[0].write_slots(pe, 0, slots, slots),
            lambda pe=pe: island[0].write_tokens(pe, 0, 0, k, v, torch.arange(2), torch.arange(2)),
            lambda pe=pe: island[0].fence(pe),
            lambda pe=pe: island[0].quiet(pe),
            lambda pe=pe: island[0].post(pe, 0, 1, 1),
        ):
            with pytest.raises(InvalidArgument, match=f"pe is {pe}; it must be from 0 to 2"):
                call()
    for row in (-1, 4):
        with pytest.raises(InvalidArgument, match=f"row is {row}; it must be from 0 to 3"):
            island[0].post(1, row, 1, 1)
