"""Layer groups with a window: what is attended to, which pages are held, and that reservations hold."""

from random import Random

import pytest
import torch

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.paged_cache import PagedKVCache
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
        cache = PagedKVCache(
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


def free(cache: PagedKVCache) -> list[int]:
    return [allocator.num_free for allocator in cache._pools.allocators]


def test_pages_behind_the_window_return_in_that_group_only() -> None:
    cache = cache_of(windowed(BOTH, None, 6), num_pages=16)
    cache.add_sequence(0)
    held = []
    for _ in range(40):
        run(cache, [0], [1], draw_inputs(BOTH, 1, seed=0))
        held.append([16 - pages for pages in free(cache)])
    assert [group for group, _ in held] == [length // 4 + 1 for length in range(40)]
    # Queries at p and later see p - 5 and what follows, until the next forward is begun.
    assert [group for _, group in held] == [p // 4 - max(p - 5, 0) // 4 + 1 for p in range(40)]
    assert cache.first_position(0) == 32
    for begin in (0, 31):
        with pytest.raises(InvalidArgument, match="positions before 32 have left the window"):
            cache.gather_kv(0, begin, 40)
    assert cache.gather_kv(0, 32, 40)[0][0].shape[0] == 8
    cache.remove_sequence(0)
    assert free(cache) == [16, 16]


def test_pools_of_different_sizes_and_out_of_pages_of_one() -> None:
    layout = windowed(BOTH, None, 6)
    pools = (pools_of(layout, 12)[0], pools_of(layout, 4)[1])
    cache = PagedKVCache(layout, pools, max_sequences=4, max_sequence_length=64, rope=ROPE, writer=None)
    cache.add_sequence(0)
    run(cache, [0], [9], draw_inputs(layout, 9, seed=0))
    assert (cache.num_pages, free(cache)) == (4, [9, 1])
    cache.add_sequence(1)
    with pytest.raises(OutOfPages, match="2 pages needed, 1 free"):
        cache.begin_forward([1], [5])
    assert (free(cache), cache.num_tokens(1)) == ([9, 1], 0)
    with pytest.raises(OutOfPages):  # what leaves the window does not suffice, and stays
        cache.begin_forward([0], [17])
    assert (free(cache), cache.first_position(0)) == ([9, 1], 0)
    run(cache, [0], [7], draw_inputs(layout, 7, seed=1))  # with the page that leaves
    assert free(cache) == [8, 1]


@pytest.mark.parametrize("window", [1, 5, 8, 13])
@pytest.mark.parametrize("longest", [1, 3, 10])
def test_a_reservation_is_kept_with_few_pages(window: int, longest: int) -> None:
    """All other pages are gone, and forks share what the window holds; the sequence grows to its end all the same."""
    layout = windowed(layout_of(1), window)
    seen = window - 1 + longest
    most = min(-(-(seen - 1) // 4) + 1, 15)
    for seed in range(2):
        random = Random(seed)
        cache, naive = cache_of(layout, num_pages=40), NaiveCache(layout)
        assert cache.num_pages_needed(60, longest) == (most,)
        cache.add_sequence(0)
        naive.add(0)
        cache.reserve(0, 60, longest)
        assert free(cache) == [40 - most]
        length = 0
        while length < 60:
            if random.random() < 0.2 and free(cache)[0] > most + 1:
                child, at = 100 + length, max(length - random.randint(0, 2), 0)
                try:
                    cache.fork_sequence(0, child, at)
                except InvalidArgument:
                    assert cache.first_position(0) > at - window
                    continue
                if random.random() < 0.5:
                    cache.remove_sequence(child)
            taken = cache._pools.allocate(free(cache))
            count = min(random.randint(1, longest), 60 - length)
            batch = ([0], [count], draw_inputs(layout, count, seed=length))
            for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
                assert_close(actual, expected)
            cache._pools.release(taken)
            length += count
        cache.clear()
        assert free(cache) == [40]


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
    with pytest.raises(InvalidArgument, match=r"have 3 positions, but those before 24 .* group 1; at least 29 are"):
        cache.pop(0, length - 3)
    with pytest.raises(InvalidArgument, match="the fork would have 28 positions"):
        cache.fork_sequence(0, 1, 28)
    assert (free(cache), cache.num_tokens(0)) == (held, length)
    cache.fork_sequence(0, 1, 29)
    naive.fork(0, 1, 29)
    cache.fork_sequence(0, 2, 0)
    naive.fork(0, 2, 0)
    batch = ([1, 0, 2], [3, 1, 8], draw_inputs(layout, 12, seed=50))
    for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
        assert_close(actual, expected)


def test_prefixes_are_not_shared() -> None:
    cache = cache_of(windowed(BOTH, None, 6))
    cache.add_sequence(0)
    with pytest.raises(InvalidArgument, match="groups with a window"):
        cache.match_prefix(0, [1] * 9)
    run(cache, [0], [9], draw_inputs(BOTH, 9, seed=0))
    with pytest.raises(InvalidArgument, match="groups with a window"):
        cache.publish_prefix(0, [1] * 9)


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
    with pytest.raises(InvalidArgument, match=rf"sinks is \(3,\) .*; \({QUERY_HEADS},\) of a floating dtype"):
        run(cache, [0], [1], draw_inputs(layout_of(2), 1, seed=0), SINKS[:3])
