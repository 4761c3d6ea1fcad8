"""The kernels of a CPU, through the cache, against attention token by token in float64."""

import itertools

import numpy as np
import pytest
import torch

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.attention import ChunkPart, DecodePart, FreshPart, plan_attention
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.tables import lay_out_tokens, look_up_pages
from tests.cache.naive import HEAD_DIM, NaiveCache, cache_of, draw_inputs, layout_of, pools_of, run
from tests.support.tolerances import assert_close

# What each sequence appends in each forward.
PROGRAMS: dict[str, list[dict[int, int]]] = {
    "prompts of one length": [{0: 7, 1: 7, 2: 7}],
    "prompts of several lengths": [{0: 7, 1: 3, 2: 12, 3: 12}],
    "a prompt of one token": [{0: 1}, {0: 1}],
    "chunks": [{0: 5}, {0: 6}, {0: 2}],
    "decodes of one length": [{0: 6, 1: 6}, {0: 1, 1: 1}, {0: 1, 1: 1}],
    "decodes of several lengths": [{0: 3, 1: 9, 2: 1}, {0: 1, 1: 1, 2: 1}, {2: 1, 0: 1}],
    "all at once": [{0: 5, 1: 9}, {2: 6, 0: 1, 3: 6, 1: 4}, {1: 1, 0: 5, 4: 1, 3: 1, 2: 2}],
}
LAYOUTS = {
    "MHA": layout_of(4),
    "GQA": layout_of(2),
    "MQA": layout_of(1),
    "two groups": layout_of(2, 4),
    "page of 1": layout_of(2, page_size=1),
    "page of 16": layout_of(2, page_size=16),
    "bfloat16": layout_of(2, dtype=torch.bfloat16),
    "float16": layout_of(1, dtype=torch.float16),
}


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_attention(layout: KVLayout, program: list[dict[int, int]], kernels: KernelFactory) -> None:
    cache, naive = cache_of(layout, num_pages=64, kernels=kernels), NaiveCache(layout)
    for step, appends in enumerate(program):
        for sequence in appends:
            if sequence not in naive.sequences:
                cache.add_sequence(sequence)
                naive.add(sequence)
        inputs = draw_inputs(layout, sum(appends.values()), seed=step)
        batch = (list(appends), list(appends.values()), inputs)
        for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
            assert actual.shape == expected.shape
            assert_close(actual, expected)


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
@pytest.mark.parametrize("layout", [layout_of(2), layout_of(2, dtype=torch.bfloat16)], ids=["float32", "bfloat16"])
def test_values_are_stored_as_they_came(layout: KVLayout, kernels: KernelFactory) -> None:
    cache = cache_of(layout, kernels=kernels)
    cache.add_sequence(3)
    inputs = draw_inputs(layout, 11, seed=0)
    run(cache, [3], [11], inputs)
    for (_, v), (_, _, given) in zip(cache.gather_kv(3, 2, 11), inputs.layers, strict=True):
        assert torch.equal(v, given[2:])


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
@pytest.mark.parametrize("rope_type", ["none", "default"])
def test_keys_are_stored_rotated_unless_rope_is_none(rope_type: str, kernels: KernelFactory) -> None:
    layout = layout_of(2)
    rope = RopeParameters(rope_type, HEAD_DIM)
    cache, naive = cache_of(layout, rope=rope, kernels=kernels), NaiveCache(layout, rope)
    cache.add_sequence(0)
    naive.add(0)
    inputs = draw_inputs(layout, 9, seed=0)
    for actual, expected in zip(run(cache, [0], [9], inputs), naive.run([0], [9], inputs), strict=True):
        assert_close(actual, expected)
    for (k, _), (_, given, _) in zip(cache.gather_kv(0, 0, 9), inputs.layers, strict=True):
        assert torch.equal(k, given) == (rope_type == "none")


def test_dynamic_rope_goes_by_the_whole_prompt() -> None:
    """Chunks of a prompt that is longer than the trained length rotate as the prompt in one piece does."""
    layout = layout_of(2)
    rope = RopeParameters("dynamic", HEAD_DIM, factor=2.0, max_position_embeddings=8)
    inputs = draw_inputs(layout, 20, seed=0)
    whole, chunked, ignorant = (cache_of(layout, rope=rope) for _ in range(3))
    for cache in (whole, chunked, ignorant):
        cache.add_sequence(0)
    run(whole, [0], [20], inputs)
    begin = 0
    for count in (3, 4, 13):
        piece = [tuple(x[begin : begin + count] for x in layer) for layer in inputs.layers]
        for cache, lengths in ((chunked, [20]), (ignorant, None)):
            plan = cache.begin_forward([0], [count], lengths)
            for layer, (q, k, v) in enumerate(piece):
                cache.attention(plan, layer, q, k, v)
            cache.end_forward(plan)
        begin += count
    stored = (cache.gather_kv(0, 0, 20) for cache in (whole, chunked, ignorant))
    for (k, _), (same, _), (other, _) in zip(*stored, strict=True):
        assert_close(k, same)  # powers and sines of arrays of other lengths may differ in their last bit
        assert not torch.allclose(k, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
def test_stale_values_of_others_never_reach_an_output(kernels: KernelFactory) -> None:
    """A page comes back from a sequence whose values were infinite."""
    layout = layout_of(2)
    cache = cache_of(layout, num_pages=6, kernels=kernels)
    cache.add_sequence(0)
    poison = draw_inputs(layout, 24, seed=0)
    for _, k, v in poison.layers:
        k.fill_(torch.inf)
        v.fill_(torch.nan)
    run(cache, [0], [24], poison)
    cache.remove_sequence(0)
    for sequence in (1, 2):
        cache.add_sequence(sequence)
    for step, (first, second) in enumerate([(1, 6), (1, 1), (2, 1), (1, 2), (1, 1)]):
        outputs = run(cache, [1, 2], [first, second], draw_inputs(layout, first + second, seed=step))
        assert all(torch.isfinite(o).all() for o in outputs)


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_a_neighbour_in_the_batch_that_is_not_finite_stays_alone(order: list[int], kernels: KernelFactory) -> None:
    layout = layout_of(2)
    cache = cache_of(layout, kernels=kernels)
    for sequence, length in ((0, 30), (1, 2), (2, 30)):
        cache.add_sequence(sequence)
        inputs = draw_inputs(layout, length, seed=length)
        for _, k, v in inputs.layers:
            k.fill_(1.0 if sequence == 1 else torch.inf)
            v.fill_(1.0 if sequence == 1 else torch.nan)
        run(cache, [sequence], [length], inputs)
    outputs = run(cache, order, [1, 1, 1], draw_inputs(layout, 3, seed=0))
    assert all(torch.isfinite(o[1]).all() for o in outputs)


def parts_of(lengths: list[int], appends: list[int]) -> tuple[object, ...]:
    layout = layout_of(2)
    tokens = lay_out_tokens(np.array(lengths), np.array(appends))
    table = np.arange(len(lengths) * 2000, dtype=np.int32).reshape(len(lengths), -1)
    tables = look_up_pages(table, np.arange(len(lengths)), tokens, layout.page_size)
    return plan_attention(tokens, tables, pools_of(layout, 1)[0], None, layout.dtype)


def test_neighbouring_prompts_of_one_length_are_one_part() -> None:
    parts = parts_of([0, 0, 0, 4, 0], [5, 5, 6, 6, 6])
    fresh = [part for part in parts if isinstance(part, FreshPart)]
    found = [(part.tokens, part.length) for part in fresh]
    assert found == [(slice(0, 10), 5), (slice(10, 16), 6), (slice(22, 28), 6)]
    assert [type(part) for part in parts if part not in fresh] == [ChunkPart]


def test_unlike_decodes_are_padded_by_at_most_the_double() -> None:
    lengths = [7000, 5, 9, 30, 6000, 2, 80, 3] + [4] * 40
    parts = parts_of(lengths, [1] * len(lengths))
    assert all(isinstance(part, DecodePart) for part in parts)
    read = sum(part.gather.shape[1] * part.gather.shape[3] for part in parts if isinstance(part, DecodePart))
    assert read <= 2 * sum(length + 4 for length in lengths)
    tokens = [part.tokens.tolist() for part in parts if isinstance(part, DecodePart)]
    assert sorted(itertools.chain(*tokens)) == list(range(len(lengths)))
    assert len(parts_of([9, 12, 30], [1, 1, 1])) == 1


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
def test_unlike_decodes_attend_as_they_do_alone(kernels: KernelFactory) -> None:
    layout = layout_of(2, page_size=1)
    together, naive = cache_of(layout, num_pages=200, kernels=kernels), NaiveCache(layout)
    lengths = [60, 1, 2, 1, 3, 1, 1, 2]
    for sequence in range(8):
        together.add_sequence(sequence)
        naive.add(sequence)
    for step, appends in enumerate((lengths, [1] * 8)):
        batch = (list(range(8)), appends, draw_inputs(layout, sum(appends), seed=step))
        for actual, expected in zip(run(together, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)
    tokens = lay_out_tokens(np.array(lengths), np.ones(8, np.int64))
    tables = look_up_pages(np.arange(800, dtype=np.int32).reshape(8, 100), np.arange(8), tokens, 1)
    assert len(plan_attention(tokens, tables, pools_of(layout, 1)[0], None, layout.dtype)) > 1


def test_copied_pages_match_bit_for_bit() -> None:
    layout = layout_of(2)
    pool = torch.randn(8, *layout.page_shape(0))
    before = pool.clone()
    TorchKernels(pool, Scoring(1.0)).copy_pages(np.array([1, 5], np.int32), np.array([2, 0], np.int32))
    expected = before.clone()
    expected[2], expected[0] = before[1], before[5]
    assert torch.equal(pool, expected)
