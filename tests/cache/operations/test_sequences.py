"""Growing, forking, popping and reserving: what sequences share, and that none disturbs another."""

import re

import pytest
import torch

from tandem.cache.plan.errors import InvalidArgument, OutOfPages, OutOfSequences
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import NaiveCache, cache_of, draw_inputs, layout_of, pools_of, run
from tests.cache.plan.test_factors import NO_FACTORS
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

LAYOUT = layout_of(2)
TWO_GROUPS = layout_of(1, 4)


def grown(length: int, num_pages: int = 8, layout: KVLayout = LAYOUT) -> tuple[TvmCache, NaiveCache]:
    """Caches with one sequence, 0, of `length` positions, made in one forward."""
    cache, naive = cache_of(layout, num_pages), NaiveCache(layout)
    cache.add_sequence(0)
    naive.add(0)
    batch = ([0], [length], draw_inputs(layout, length, seed=length))
    run(cache, *batch)
    naive.run(*batch)
    return cache, naive


def append(cache: TvmCache, naive: NaiveCache, sequence: int, count: int, seed: int) -> None:
    batch = ([sequence], [count], draw_inputs(cache.layout, count, seed))
    for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
        assert_close(actual, expected)


def used(cache: TvmCache) -> int:
    return cache.num_pages - cache.num_free_pages


@pytest.mark.parametrize("layout", [LAYOUT, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize(("position", "pages"), [(-1, 4), (8, 3), (9, 4), (5, 4), (0, 3), (11, 4)])
def test_a_fork_shares_full_pages(layout: KVLayout, position: int, pages: int) -> None:
    cache, naive = grown(11, layout=layout)
    cache.fork_sequence(0, 1, position)
    length = 11 if position == -1 else position
    naive.fork(0, 1, length)
    assert cache.num_tokens(1) == length
    assert used(cache) == pages
    for (k, v), (own_k, own_v) in zip(cache.gather_kv(0, 0, length), cache.gather_kv(1, 0, length), strict=True):
        assert torch.equal(k, own_k)
        assert torch.equal(v, own_v)
    before = cache.gather_kv(0, 0, 11)
    append(cache, naive, 1, 3, seed=1)
    append(cache, naive, 0, 2, seed=2)
    append(cache, naive, 1, 1, seed=3)
    for (k, v), (now_k, now_v) in zip(before, cache.gather_kv(0, 0, 11), strict=True):
        assert torch.equal(k, now_k)
        assert torch.equal(v, now_v)


def test_pages_return_with_their_last_user() -> None:
    cache, _ = grown(11)
    cache.fork_sequence(0, 1)
    cache.remove_sequence(0)
    cache.remove_sequence(0)
    assert used(cache) == 3
    assert not cache.is_empty
    cache.remove_sequence(1)
    assert used(cache) == 0
    assert cache.is_empty


def test_pop_returns_pages() -> None:
    cache, naive = grown(11)
    cache.pop(0, 3)
    assert (cache.num_tokens(0), used(cache)) == (8, 2)
    naive.pop(0, 3)
    append(cache, naive, 0, 2, seed=1)
    cache.pop(0, 10)
    assert (cache.num_tokens(0), used(cache)) == (0, 0)


def test_pop_into_a_shared_page_copies_it_at_the_next_append() -> None:
    cache, naive = grown(8)
    cache.fork_sequence(0, 1)
    naive.fork(0, 1, 8)
    cache.pop(1, 2)
    naive.pop(1, 2)
    assert used(cache) == 2
    append(cache, naive, 1, 1, seed=1)
    assert used(cache) == 3
    append(cache, naive, 0, 1, seed=2)


def test_two_that_share_a_partial_page_both_go_on_in_one_forward() -> None:
    cache, naive = grown(8)
    for sequence in (1, 2):
        cache.fork_sequence(0, sequence)
        naive.fork(0, sequence, 8)
        cache.pop(sequence, 1)
        naive.pop(sequence, 1)
    cache.remove_sequence(0)
    batch = ([1, 2], [1, 3], draw_inputs(LAYOUT, 4, seed=1))
    for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
        assert_close(actual, expected)
    assert used(cache) == 4
    cache.clear()
    assert cache.num_free_pages == cache.num_pages


def test_out_of_pages_leaves_everything_as_it_was() -> None:
    cache, naive = grown(11, num_pages=4)
    cache.fork_sequence(0, 1, 8)
    naive.fork(0, 1, 8)
    cache.pop(1, 1)
    naive.pop(1, 1)
    cache.add_sequence(2)
    naive.add(2)
    for call in (
        lambda: cache.begin_forward([0, 1, 2], [1, 1, 1]),  # one page to copy, one to add
        lambda: cache.prepare_receive(1, 2),
        lambda: cache.reserve(0, 20),
        lambda: cache.reserve(1, 12),
    ):
        with pytest.raises(OutOfPages):
            call()
        assert [cache.num_tokens(sequence) for sequence in (0, 1, 2)] == [11, 7, 0]
        assert cache.num_free_pages == 1
    append(cache, naive, 2, 4, seed=1)
    with pytest.raises(OutOfPages):
        cache.fork_sequence(0, 3)
    with pytest.raises(InvalidArgument, match="sequence 3 is not there"):
        cache.num_tokens(3)
    append(cache, naive, 0, 1, seed=2)


def test_a_reservation_is_kept() -> None:
    cache, naive = grown(5, num_pages=6)
    cache.reserve(0, 16)
    assert used(cache) == 4
    cache.add_sequence(1)
    run(cache, [1], [8], draw_inputs(LAYOUT, 8, seed=1))
    for count in (3, 8):
        append(cache, naive, 0, count, seed=count)
    cache.pop(0, 14)
    naive.pop(0, 14)
    assert cache.num_free_pages == 0
    append(cache, naive, 0, 14, seed=2)
    with pytest.raises(OutOfPages):
        cache.begin_forward([0], [1])
    cache.remove_sequence(0)
    assert cache.num_free_pages == 4


def test_a_reserved_sequence_popped_into_shared_pages_has_its_own_at_once() -> None:
    cache, naive = grown(14, num_pages=8)
    cache.reserve(0, 16)
    cache.fork_sequence(0, 1, 12)
    naive.fork(0, 1, 12)
    assert used(cache) == 4
    cache.pop(0, 9)
    naive.pop(0, 9)
    assert used(cache) == 6  # page indexes 1 and 2 were shared
    cache.add_sequence(2)
    run(cache, [2], [8], draw_inputs(LAYOUT, 8, seed=1))
    append(cache, naive, 0, 11, seed=2)
    for layer, (k, v) in enumerate(cache.gather_kv(1, 0, 12)):
        assert_close(k, naive.sequences[1].keys[layer][:12])
        assert_close(v, naive.sequences[1].values[layer][:12])


def test_pop_of_a_reserved_sequence_that_cannot_have_its_own_pages_changes_nothing() -> None:
    cache, naive = grown(8, num_pages=2)
    cache.reserve(0, 8)
    cache.fork_sequence(0, 1)
    naive.fork(0, 1, 8)
    with pytest.raises(OutOfPages):
        cache.pop(0, 3)
    assert cache.num_tokens(0) == 8
    cache.remove_sequence(1)
    cache.pop(0, 3)
    naive.pop(0, 3)
    append(cache, naive, 0, 3, seed=1)


def test_clear_forgets_everything() -> None:
    cache, _ = grown(11)
    cache.reserve(0, 20)
    cache.publish_prefix(0, list(range(11)))
    cache.clear()
    assert cache.is_empty
    assert (cache.num_free_pages, cache.num_cached_pages) == (cache.num_pages, 0)
    cache.add_sequence(0)
    assert cache.match_prefix(0, list(range(11))) == 0


def test_wrong_values_are_refused() -> None:
    cache, _ = grown(5)
    with pytest.raises(InvalidArgument, match="sequence 0 is there already"):
        cache.add_sequence(0)
    with pytest.raises(InvalidArgument, match="sequence 7 is not there"):
        cache.begin_forward([0, 7], [1, 1])
    with pytest.raises(InvalidArgument, match="not distinct"):
        cache.begin_forward([0, 0], [1, 1])
    with pytest.raises(InvalidArgument, match="append_lengths has 0; each must be from 1 to 64"):
        cache.begin_forward([0], [0])
    with pytest.raises(InvalidArgument, match="append_lengths has shape"):
        cache.begin_forward([0], [1, 2])
    with pytest.raises(InvalidArgument, match="would have 69 positions; 0 … 64 fit"):
        cache.begin_forward([0], [64])
    with pytest.raises(InvalidArgument, match=r"counts has 6 for sequence [0-9]+; it must be from 0 to 5"):
        cache.pop(0, 6)
    with pytest.raises(InvalidArgument, match="position is 6"):
        cache.fork_sequence(0, 1, 6)
    with pytest.raises(InvalidArgument, match="end are 2 and 6"):
        cache.gather_kv(0, 2, 6)
    length, free = cache.num_tokens(0), cache.num_free_pages
    with pytest.raises(InvalidArgument, match=r"rope_lengths has shape \(2,\); it must be \[B\], B = 1"):
        cache.begin_forward([0], [1], rope_lengths=[9, 9])
    assert (cache.num_tokens(0), cache.num_free_pages) == (length, free)
    plan, (q, k, v) = cache.begin_forward([0], [1]), draw_inputs(LAYOUT, 1, seed=0).layers[0]
    for layer in (-1, LAYOUT.num_layers):
        with pytest.raises(InvalidArgument, match=f"layer is {layer}; it must be one of 0, 1"):
            cache.attention(plan, layer, q, k, v)
    for sequence in range(1, 16):
        cache.add_sequence(sequence)
    with pytest.raises(OutOfSequences, match="max_sequences is 16"):
        cache.add_sequence(16)
    with pytest.raises(OutOfSequences):
        cache.fork_sequence(0, 16)


@pytest.mark.parametrize("value", NO_FACTORS)
def test_heads_that_cannot_be(value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"^scale is {re.escape(str(value))}; it must be a number from"):
        cache_of(LAYOUT, scale=value)
    with pytest.raises(InvalidArgument, match=f"^softcap is {re.escape(str(value))}; it must be a number from"):
        cache_of(LAYOUT, softcap=value)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ((), "0 pools were given; the layout has 1 groups"),
        ((torch.empty(8, 2, 2, 1, 4, 8),), "pool 0 is"),
        (pools_of(layout_of(2, dtype=torch.bfloat16), 8), "torch.bfloat16; it must be .* of torch.float32"),
    ],
)
def test_pools_must_fit_the_layout(pools: tuple[torch.Tensor, ...], message: str) -> None:
    rope = RopeParameters("none", 0)
    with pytest.raises(InvalidArgument, match=message):
        TvmCache(LAYOUT, pools, max_sequences=1, max_sequence_length=8, rope=rope, writer=None)
