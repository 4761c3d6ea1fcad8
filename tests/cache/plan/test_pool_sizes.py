"""Pages of groups with a window: never fewer than can be used, and the memory that is left goes to the others."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.kinds.kv import KV
from tandem.cache.paged_cache import PagedKVCache
from tandem.cache.plan.errors import OutOfPages
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.pool_sizes import PageUse, num_pages_in, pages_of_groups
from tandem.cache.plan.spans import Window, span_of
from tests.cache.naive import ROPE, pools_of

PAGE = 4
windows = st.none() | st.integers(1, 40)
uses = st.builds(PageUse, st.integers(1, 9), st.integers(1, 80), st.integers(1, 30))


def layout_of(*windows: int | None) -> KVLayout:
    """Groups of unlike sizes."""
    groups = (LayerGroup((layer,), KV(layer + 1, 8, span_of(window))) for layer, window in enumerate(windows))
    return KVLayout(tuple(groups), PAGE, torch.float32)


def num_bytes(layout: KVLayout, counts: tuple[int, ...]) -> int:
    return sum(count * layout.page_bytes(group) for group, count in enumerate(counts))


def cache_with(layout: KVLayout, counts: tuple[int, ...], sequences: int, length: int) -> PagedKVCache:
    pools = [pools_of(layout, count)[group] for group, count in enumerate(counts)]
    return PagedKVCache(layout, pools, max_sequences=sequences, max_sequence_length=length, rope=ROPE, writer=None)


def sequences_that_fit(cache: PagedKVCache, length: int, append: int) -> int:
    for sequence in range(1000):
        cache.add_sequence(sequence)
        try:
            cache.reserve(sequence, length, append)
        except OutOfPages:
            return sequence
    raise AssertionError("the pools have no end")


@given(windows=st.lists(windows, min_size=1, max_size=3), given=st.lists(uses, min_size=1, max_size=2))
def test_a_window_never_runs_out_before_the_rest(windows: list[int | None], given: list[PageUse]) -> None:
    """If groups without a window have room for the most demanding use, all of it can be reserved."""
    layout = layout_of(*windows)
    for use in given:
        enough = use.sequences * -(-use.length // PAGE)
        counts = pages_of_groups(layout, enough, given)
        assert max(counts) <= enough
        cache = cache_with(layout, counts, use.sequences, use.length)
        for sequence in range(use.sequences):
            cache.add_sequence(sequence)
            cache.reserve(sequence, use.length, use.append)


@given(
    windows=st.lists(windows, min_size=1, max_size=3),
    given=st.lists(uses, min_size=1, max_size=2),
    memory=st.integers(0, 1 << 18),
)
def test_memory_is_filled_and_no_more(windows: list[int | None], given: list[PageUse], memory: int) -> None:
    layout = layout_of(*windows)
    pages = num_pages_in(layout, memory, given)
    assert num_bytes(layout, pages_of_groups(layout, pages, given)) <= memory
    if None in windows:
        assert num_bytes(layout, pages_of_groups(layout, pages + 1, given)) > memory


def test_the_same_memory_holds_more_sequences() -> None:
    """Every second layer sees 16 positions of sequences of 256: with pools of one size half the memory lies idle."""
    layout = KVLayout((LayerGroup((0, 2), KV(2, 8, Window(16))), LayerGroup((1, 3), KV(2, 8))), PAGE, torch.float32)
    length, append, sequences = 256, 2, 30
    memory = num_bytes(layout, (10 * length // PAGE,) * 2)
    use = [PageUse(sequences, length, append)]
    counts = pages_of_groups(layout, num_pages_in(layout, memory, use), use)
    assert num_bytes(layout, counts) <= memory
    alike = cache_with(layout, (10 * length // PAGE,) * 2, 100, length)
    fitted = cache_with(layout, counts, 100, length)
    assert sequences_that_fit(alike, length, append) == 10
    assert sequences_that_fit(fitted, length, append) >= 17
