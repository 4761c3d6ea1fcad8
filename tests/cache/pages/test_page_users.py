"""Checks the pages that reserved sequences with a window need when others use their pages, too."""

import numpy as np
import pytest

from tandem.cache.pages.allocator import PageAllocator
from tandem.cache.pages.page_users import PageUsers
from tandem.cache.plan.errors import OutOfPages
from tests.cache.naive import ROPE, layout_of, pools_of, windowed
from tests.support.tvm_cache import TvmCache

PAGE, WINDOW, LENGTH = 4, 9, 60
TOKENS = list(range(100, 100 + LENGTH))
LAYOUT = windowed(layout_of(1), WINDOW)
NEEDED = LAYOUT.most_pages(0, LENGTH, 1)


def cache_with(num_pages: int) -> TvmCache:
    pools = pools_of(LAYOUT, num_pages)
    return TvmCache(LAYOUT, pools, max_sequences=4, max_sequence_length=64, rope=ROPE, writer=None)


def begin(cache: TvmCache, sequence: int, count: int, *, reserve: int = LENGTH) -> int:
    """A sequence that holds TOKENS[:count], with as many positions reserved; how many of them it found."""
    cache.add_sequence(sequence)
    matched = cache.match_prefix(sequence, TOKENS)
    if reserve:
        cache.reserve(sequence, reserve, 1)
    for _ in range(matched, count):
        cache.begin_forward([sequence], [1])
    return matched


def grow(cache: TvmCache, *sequences: int, end: int = LENGTH) -> None:
    """Grows the sequences together in each forward, so that they drop pages together."""
    while cache.num_tokens(sequences[0]) < end:
        cache.begin_forward(sequences, [1] * len(sequences))


@pytest.mark.parametrize("first", [0, 1, None])
def test_both_grow_to_their_ends_whoever_lets_go_first(first: int | None) -> None:
    cache = cache_with(2 * NEEDED)
    begin(cache, 0, 12)
    cache.publish_prefix(0, TOKENS[:12])
    assert begin(cache, 1, 12) == 12
    assert cache.num_free_pages == 0
    if first is None:
        grow(cache, 0, 1)
    else:
        grow(cache, first)
        grow(cache, 1 - first)
    cache.clear()
    assert cache.num_free_pages == 2 * NEEDED


def test_one_that_received_its_prompt_grows_too() -> None:
    cache = cache_with(2 * NEEDED)
    cache.add_sequence(0)
    cache.reserve(0, LENGTH, 1)
    cache.prepare_receive(0, 12)
    cache.finish_receive(0)
    cache.publish_prefix(0, TOKENS[:12])
    assert begin(cache, 1, 12) == 12
    grow(cache, 0)
    grow(cache, 1)


def test_a_prefix_takes_no_more_room_than_pages_of_ones_own() -> None:
    cache = cache_with(NEEDED)
    begin(cache, 0, 12)
    cache.publish_prefix(0, TOKENS[:12])
    cache.remove_sequence(0)
    assert begin(cache, 1, 12) == 12
    assert cache.num_free_pages == 0
    grow(cache, 1)
    cache.remove_sequence(1)
    assert cache.num_free_pages == NEEDED


def test_what_is_owed_is_taken_by_nobody_else() -> None:
    cache = cache_with(NEEDED + 3)
    begin(cache, 0, 12)
    cache.publish_prefix(0, TOKENS[:12])
    assert begin(cache, 1, 12, reserve=0) == 12
    assert (cache.num_free_pages, cache._pools.allocators[0].num_free) == (1, 3)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 free"):
        begin(cache, 2, 8, reserve=8)
    cache.remove_sequence(2)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 free"):
        cache.fork_sequence(1, 3, 12)
    cache.add_sequence(3)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 free"):
        cache.match_prefix(3, TOKENS)
    assert (cache.num_free_pages, cache.num_tokens(3)) == (1, 0)
    cache.remove_sequence(1)
    assert cache.num_free_pages == 3
    assert cache.match_prefix(3, TOKENS) == 12
    grow(cache, 0)


def test_pages_that_several_let_go_of_at_once_settle_as_much_as_they_owe() -> None:
    indexed = np.zeros(4, np.bool_)
    users = PageUsers(PageAllocator(4), indexed)
    pages = users.allocator.allocate(3)
    users.retain(pages[:2])
    users.retain(pages[:1])
    indexed[pages[2]] = True
    users.allocator.retain(pages[2:])
    assert users.num_owed == 3
    assert users.num_settled(pages[[0, 0, 0, 1, 2]]) == 3
    users.release(pages[[0, 0, 0, 1, 2]])
    assert (users.num_owed, users.allocator.num_free) == (0, 2)
    users.retain(pages[2:])
    assert users.num_owed == 0, "the index counts as no user"
