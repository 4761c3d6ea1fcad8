"""Layer groups with a window: what is attended to, which pages are held, and that reservations hold."""

from random import Random

import pytest
import torch

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import (
    HEAD_DIM,
    QUERY_HEADS,
    ROPE,
    NaiveCache,
    cache_of,
    draw_inputs,
    layout_of,
    pools_of,
    run,
    windowed,
)
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

PROGRAM: list[dict[int, int]] = [
    {0: 31, 1: 5, 2: 1},
    {0: 1, 1: 1, 2: 1},
    {0: 9, 1: 1, 3: 17, 2: 30},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {3: 4, 4: 12, 5: 12, 0: 2},
    {0: 1, 3: 1},
    {1: 3, 0: 1},
    {1: 1},
    {1: 1, 0: 1, 2: 1},
]
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
BOTH = layout_of(2, 1)


def check(
    layout: KVLayout,
    kernels: KernelFactory,
    program: list[dict[int, int]],
    scale: float | None = None,
    softcap: float | None = None,
) -> None:
    ropes = [ROPE, RopeParameters("default", HEAD_DIM, theta=1000.0)][: len(layout.groups)]
    for sinks in (None, SINKS):
        cache = cache_of(layout, 160, ropes, kernels, scale, softcap)
        naive = NaiveCache(layout, ropes, scale, softcap, sinks)
        for step, appends in enumerate(program):
            for sequence in appends:
                if sequence not in naive.sequences:
                    cache.add_sequence(sequence)
                    naive.add(sequence)
            batch = (list(appends), list(appends.values()), draw_inputs(layout, sum(appends.values()), seed=step))
            for actual, expected in zip(run(cache, *batch, sinks), naive.run(*batch), strict=True):
                assert_close(actual, expected)


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
@pytest.mark.parametrize(
    ("window", "dtype"),
    [(1, torch.float32), (4, torch.float32), (7, torch.float32), (30, torch.float32), (6, torch.bfloat16)],
)
def test_attention_in_one_group(window: int, dtype: torch.dtype, kernels: KernelFactory) -> None:
    check(windowed(layout_of(2, dtype=dtype), window), kernels, PROGRAM)


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("options", [{}, {"scale": 1.5, "softcap": 0.4}])
def test_global_and_local_layers(options: dict[str, float], page_size: int, kernels: KernelFactory) -> None:
    """Two groups with windows of their own and RoPE of their own, softcap, scale and sinks."""
    check(windowed(layout_of(2, 1, page_size=page_size), None, 6), kernels, PROGRAM, **options)


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
def test_long_prompts_and_long_decodes(kernels: KernelFactory) -> None:
    """Bands of several blocks of queries; decodes whose window is longer than the native kernel's chunk."""
    for window in (3, 300, 700):
        layout = windowed(layout_of(1), window)
        pools, sizes = pools_of(layout, 300), (1000, 1, 1)
        cache = TvmCache(
            layout,
            pools,
            max_sequences=1,
            max_sequence_length=1100,
            rope=RopeParameters("none", 0),
            writer=None,
            kernels=kernels,
        )
        naive = NaiveCache(layout, RopeParameters("none", 0))
        cache.add_sequence(0)
        naive.add(0)
        for step, count in enumerate(sizes):
            batch = ([0], [count], draw_inputs(layout, count, seed=step))
            for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
                assert_close(actual, expected)


def free(cache: TvmCache) -> list[int]:
    return [allocator.num_free for allocator in cache._pools.allocators]


def test_pages_behind_the_window_return_in_that_group_only() -> None:
    cache = cache_of(windowed(BOTH, None, 6), num_pages=16)
    cache.add_sequence(0)
    held = []
    for _ in range(40):
        run(cache, [0], [1], draw_inputs(BOTH, 1, seed=0))
        held.append([16 - pages for pages in free(cache)])
    assert [group for group, _ in held] == [length // 4 + 1 for length in range(40)]
    # A query at the start of the last one's page sees 5 positions before it, until the next forward is begun.
    assert [group for _, group in held] == [p // 4 - max(p // 4 * 4 - 5, 0) // 4 + 1 for p in range(40)]
    assert cache.first_position(0) == 28
    for begin in (0, 27):
        with pytest.raises(InvalidArgument, match="positions before 28 have left the window"):
            cache.gather_kv(0, begin, 40)
    assert cache.gather_kv(0, 28, 40)[0][0].shape[0] == 12
    cache.remove_sequence(0)
    assert free(cache) == [16, 16]


def test_pools_of_different_sizes_and_out_of_pages_of_one() -> None:
    layout = windowed(BOTH, None, 6)
    pools = (pools_of(layout, 12)[0], pools_of(layout, 4)[1])
    cache = TvmCache(layout, pools, max_sequences=4, max_sequence_length=64, rope=ROPE, writer=None)
    cache.add_sequence(0)
    run(cache, [0], [12], draw_inputs(layout, 12, seed=0))
    assert (cache.pages.total, free(cache)) == (4, [9, 1])
    cache.add_sequence(1)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 free"):
        cache.begin_forward([1], [5])
    assert (free(cache), cache.num_tokens(1)) == ([9, 1], 0)
    with pytest.raises(OutOfPages):  # what leaves the window does not suffice, and stays
        cache.begin_forward([0], [17])
    assert (free(cache), cache.first_position(0)) == ([9, 1], 0)
    run(cache, [0], [7], draw_inputs(layout, 7, seed=1))  # with the page that leaves
    assert free(cache) == [7, 0]


@pytest.mark.parametrize("window", [1, 5, 8, 13])
@pytest.mark.parametrize("longest", [1, 3, 10])
def test_a_reservation_is_kept_with_few_pages(window: int, longest: int) -> None:
    """All other pages are gone, and forks share what the window holds; the sequence grows to its end all the same."""
    layout = windowed(layout_of(1), window)
    most = min(-(-(window - 1) // 4) + (2 + longest) // 4 + 1, 15)
    for seed in range(2):
        random = Random(seed)
        cache, naive = cache_of(layout, num_pages=40), NaiveCache(layout)
        assert cache.room(60, longest).needed == (most,)
        cache.add_sequence(0)
        naive.add(0)
        cache.reserve(0, 60, longest)
        assert free(cache) == [40 - most]
        length = 0
        while length < 60:
            if random.random() < 0.2 and cache._pools.num_free[0] > most + 1:
                child, at = 100 + length, max(length - random.randint(0, 2), 0)
                try:
                    cache.fork_sequence(0, child, at)
                except InvalidArgument:
                    assert cache.first_position(0) > at // 4 * 4 - window
                    continue
                if random.random() < 0.5:
                    cache.remove_sequence(child)
            taken = cache._pools.allocate(cache._pools.num_free)
            count = min(random.randint(1, longest), 60 - length)
            batch = ([0], [count], draw_inputs(layout, count, seed=length))
            for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
                assert_close(actual, expected)
            cache._pools.release(taken)
            length += count
        cache.clear()
        assert free(cache) == [40]


def test_what_is_popped_takes_no_page_for_those_that_the_prefix_index_shares() -> None:
    """They come back when they leave the window, as those that nobody shares do."""
    layout = windowed(layout_of(1), 9)
    cache = cache_of(layout, num_pages=40)
    cache.add_sequence(0)
    cache.reserve(0, 60, 5)
    run(cache, [0], [12], draw_inputs(layout, 12, seed=0))
    cache.publish_prefix(0, list(range(12)))
    taken = cache._pools.allocate(cache._pools.num_free)
    for step in range(9):
        run(cache, [0], [5], draw_inputs(layout, 5, seed=step))
        cache.pop(0, 2 if step % 2 else 3)
    cache._pools.release(taken)


def test_what_a_forward_appended_can_be_popped() -> None:
    layout = windowed(BOTH, None, 6)
    cache, naive = cache_of(layout), NaiveCache(layout)
    cache.add_sequence(0)
    naive.add(0)
    cache.reserve(0, 60, 9)
    length = 0
    for step, (count, popped) in enumerate([(9, 4), (9, 9), (7, 0), (9, 1), (1, 1), (9, 0), (2, 2), (9, 5)]):
        batch = ([0], [count], draw_inputs(layout, count, seed=step))
        for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)
        cache.pop(0, popped)
        naive.pop(0, popped)
        length += count - popped
    assert cache.num_tokens(0) == length
    held = free(cache)
    with pytest.raises(
        InvalidArgument, match=r"have 3 positions, but those before 20 .* group 1; it must have at least 28"
    ):
        cache.pop(0, length - 3)
    with pytest.raises(InvalidArgument, match="the fork would have 27 positions"):
        cache.fork_sequence(0, 1, 27)
    assert (free(cache), cache.num_tokens(0)) == (held, length)
    cache.fork_sequence(0, 1, 29)
    naive.fork(0, 1, 29)
    cache.fork_sequence(0, 2, 0)
    naive.fork(0, 2, 0)
    batch = ([1, 0, 2], [3, 1, 8], draw_inputs(layout, 12, seed=50))
    for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("windows", [(None, 6), (4, 9)])
@pytest.mark.parametrize("length", range(24, 29))
def test_a_prefix_is_found_where_windows_have_what_comes_before_its_end(
    windows: tuple[int | None, int], length: int
) -> None:
    """Single steps leave the last windows. Of a prompt that was one forward every prefix is found."""
    layout, tokens = windowed(BOTH, *windows), list(range(100, 140))
    cache, naive = cache_of(layout, num_pages=64), NaiveCache(layout)
    for sequence in range(2):
        cache.add_sequence(sequence)
        naive.add(sequence)
    batch = ([0, 1], [20, length], draw_inputs(layout, 20 + length, seed=0))
    run(cache, *batch)
    naive.run(*batch)
    for step in range(length - 20):
        batch = ([0], [1], draw_inputs(layout, 1, seed=step))
        run(cache, *batch)
        naive.run(*batch)
    cache.publish_prefix(0, tokens[:length])
    cache.publish_prefix(1, tokens[1 : length + 1])
    whole = length // 4 * 4
    for child, (parent, prompt, found) in enumerate(
        [
            (0, tokens, whole),
            (0, [*tokens[: whole - 5], 7, 7, 7, 7], 0),
            (1, tokens[1:], whole),
            (1, [*tokens[1 : whole - 3], 7, 7], whole - 4),
            (1, [*tokens[1:6], 7, 7], 4),
        ],
        start=2,
    ):
        cache.add_sequence(child)
        assert cache.match_prefix(child, prompt) == found
        naive.fork(parent, child, found)
        batch = ([child], [6], draw_inputs(layout, 6, seed=child))
        for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)
    cache.clear()
    assert free(cache) == [64, 64]


def test_pages_of_windows_give_way_alone() -> None:
    """The group with a window needs room first: its oldest pages go, and prefixes that end after others stay."""
    layout = windowed(BOTH, None, 6)
    pools = (pools_of(layout, 32)[0], pools_of(layout, 6)[1])
    cache = TvmCache(layout, pools, max_sequences=4, max_sequence_length=64, rope=ROPE, writer=None)
    for sequence, first in enumerate((100, 200)):
        tokens = list(range(first, first + 12))
        cache.add_sequence(sequence)
        run(cache, [sequence], [12], draw_inputs(layout, 12, seed=first))
        cache.publish_prefix(sequence, tokens)
        cache.remove_sequence(sequence)
    assert (free(cache), cache.pages.cached) == ([26, 0], 6)
    cache.add_sequence(2)
    run(cache, [2], [8], draw_inputs(layout, 8, seed=2))
    assert (free(cache), cache.pages.cached) == ([24, 0], 6)
    for child, (first, found) in enumerate(((100, 4), (200, 12)), start=3):
        cache.add_sequence(child)
        assert cache.match_prefix(child, [*range(first, first + 12), 1]) == found
        cache.remove_sequence(child)
    with pytest.raises(OutOfPages, match="5 pages needed, 4 free"):
        cache.begin_forward([2], [20])


def test_wrong_values_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="size of the window is 0; it must be at least 1"):
        windowed(BOTH, None, 0)
    with pytest.raises(InvalidArgument, match="rope has 1 entries; the layout has 2 groups"):
        cache_of(BOTH, rope=[ROPE])
    with pytest.raises(InvalidArgument, match="rotary_dim is 16; the head_dim of its group is 8"):
        cache_of(BOTH, rope=[ROPE, RopeParameters("default", 16)])
    assert windowed(BOTH, None, 5).fingerprint != windowed(BOTH, None, 6).fingerprint
    cache = cache_of(layout_of(2))
    cache.add_sequence(0)
    with pytest.raises(
        InvalidArgument, match=rf"sinks is \(3,\) .*; it must be \({QUERY_HEADS},\) of a floating dtype"
    ):
        run(cache, [0], [1], draw_inputs(layout_of(2), 1, seed=0), SINKS[:3])
