"""Checks what stands after the end of received positions. The writer's pages are left alone, and their contents reach
no output."""

import pytest
import torch

from tests.cache.naive import ROPE, NaiveCache, draw_inputs, layout_of, pools_of, run, windowed
from tests.cache.peer_writer import PeerWriter
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

LAYOUT = layout_of(1, 2, dtype=torch.bfloat16)  # 16 bits: torch's kernels, which read whole pages


def two_caches(window: int | None) -> tuple[TvmCache, TvmCache, tuple[torch.Tensor, ...]]:
    """A sender, a receiver, and the receiver's pools, full of NaN."""
    layout = windowed(LAYOUT, None, window)
    pools = [pools_of(layout, 24) for _ in range(2)]
    sender, receiver = (
        TvmCache(layout, own, max_sequences=8, max_sequence_length=64, rope=ROPE, writer=PeerWriter(pe, pools))
        for pe, own in enumerate(pools)
    )
    return sender, receiver, pools[1]


def test_pages_are_left_alone_once_a_writer_was_told_of_them() -> None:
    """It may have written before any work that is queued here runs."""
    sender, receiver, pools = two_caches(None)
    receiver.add_sequence(0)
    sender.add_sequence(0)
    receiver.reserve(0, 20)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 10), 1)
    assert all(bool(pool.isnan().all()) for pool in pools)
    run(sender, [0], [10], draw_inputs(LAYOUT, 10, seed=0))
    before = [pool.clone() for pool in pools]
    receiver.finish_receive(0)
    assert all(
        torch.equal(pool.view(torch.int16), old.view(torch.int16)) for pool, old in zip(pools, before, strict=True)
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [1, 3, 4, 10, 12])
@pytest.mark.parametrize("forked", [False, True])
def test_what_was_there_before_reaches_no_output(length: int, window: int | None, forked: bool) -> None:
    """A longer sequence in the same batch makes attention read past the end of the others."""
    sender, receiver, _ = two_caches(window)
    naive = NaiveCache(receiver.layout)
    sender.add_sequence(0)
    receiver.add_sequence(0)
    naive.add(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, length), 1)
    inputs = draw_inputs(LAYOUT, length, seed=0)
    run(sender, [0], [length], inputs)
    naive.run([0], [length], inputs)
    receiver.finish_receive(0)
    sequences = [0, 7]
    if forked:
        receiver.fork_sequence(0, 1)
        naive.fork(0, 1, length)
        sequences = [1, 0, 7]
    receiver.add_sequence(7)
    naive.add(7)
    longer = draw_inputs(LAYOUT, 19, seed=7)
    run(receiver, [7], [19], longer)
    naive.run([7], [19], longer)
    for step in range(1, 6):
        batch = (sequences, [1] * len(sequences), draw_inputs(LAYOUT, len(sequences), seed=step))
        for actual, expected in zip(run(receiver, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize("window", [None, 5])
def test_what_was_in_a_reserved_page_reaches_no_output(window: int | None) -> None:
    """A step begins it, so that only one of its positions is written."""
    _, cache, _ = two_caches(window)
    naive, lengths = NaiveCache(cache.layout), {0: 2, 7: 19}
    for sequence in lengths:
        cache.add_sequence(sequence)
        naive.add(sequence)
        cache.reserve(sequence, 30)
    for step, counts in enumerate([list(lengths.values())] + [[1, 1]] * 6):
        batch = (list(lengths), counts, draw_inputs(LAYOUT, sum(counts), seed=step))
        for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)
