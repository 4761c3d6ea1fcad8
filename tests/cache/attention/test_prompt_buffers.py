"""Forwards of prompts in graph buffers against plain ones: padding stores nothing, what does not fit is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.kernels.base import Limits
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tests.cache.attention.test_step_buffers import (
    DYNAMIC,
    LENGTHS,
    contents,
    draw,
    make_cache,
    padded,
    run,
    run_forward,
)
from tests.cache.table_kernels import TableKernels
from tests.support.tvm_cache import TvmCache

SIZES, ROOM = [4, 11], 3
NOTHING = np.zeros(0, np.int64)
Forwards = list[dict[int, int]]


def prompt_buffers(cache: TvmCache, sizes: list[int], num_sequences: int) -> list[GraphBuffers]:
    return cache.graph_buffers([Limits.of_prompts(size, num_sequences, 4) for size in sizes])


def begin(cache: TvmCache, buffers: GraphBuffers, counts: dict[int, int], *inputs: Int64Array) -> None:
    cache.commit(cache.begin(Batch(list(counts), list(counts.values()), push=False), buffers, inputs))


def forwards() -> st.SearchStrategy[Forwards]:
    """Draws for each forward some sequences, in any order, and how many tokens they get, SIZES[-1] at most."""
    counts = st.dictionaries(st.integers(0, len(LENGTHS) - 1), st.integers(1, 8), min_size=1, max_size=ROOM)
    return st.lists(counts.filter(lambda one: sum(one.values()) <= SIZES[-1]), min_size=1, max_size=5)


@settings(deadline=None)
@given(forwards())
def test_forwards_equal_plain_ones(program: Forwards) -> None:
    fixed, plain = make_cache(), make_cache()
    small, large = prompt_buffers(fixed, SIZES, ROOM)
    for step, counts in enumerate(program):
        total = sum(counts.values())
        if max(map(fixed.num_tokens, counts)) + total > 40:
            break
        prompts, inputs = small if total <= small.size else large, draw(total, seed=step)
        ids, rows = np.arange(total) + 7, np.cumsum(list(counts.values())) - 1
        begin(fixed, prompts, counts, ids, rows)
        assert prompts.inputs[0][:total].tolist() == ids.tolist()
        assert prompts.inputs[1][: len(counts)].tolist() == rows.tolist()
        expected = run_forward(plain, list(counts), list(counts.values()), inputs)
        actual = run(prompts.attention().attend, padded(inputs, prompts.size))
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours[:total], theirs)
    for ours, theirs in zip(contents(fixed), contents(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_a_cleared_forward_touches_no_page() -> None:
    cache = make_cache()
    for prompts in prompt_buffers(cache, [*SIZES, 100], ROOM):  # a sequence has 40 tokens at most
        before = contents(cache)
        prompts.clear()
        run(prompts.attention().attend, draw(prompts.size, seed=1))
        assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))


def test_what_is_marked_is_left_to_be_sent_afterwards() -> None:
    cache = make_cache()
    (prompts,) = prompt_buffers(cache, [4], ROOM)
    cache.mark_send(0, 0, PositionMap(0, (SlotRuns.from_slots(range(7)),) * 2), 1)
    begin(cache, prompts, {0: 4}, np.zeros(4, np.int64), NOTHING)
    assert cache.num_sent(0) == 0
    run(prompts.attention().attend, draw(4, seed=0))
    cache.send_cached(0)
    assert cache.sends_done(0)


def test_there_are_none_where_kernels_or_rope_cannot() -> None:
    assert prompt_buffers(make_cache(TorchKernels), SIZES, ROOM) == []
    assert prompt_buffers(make_cache(rope=DYNAMIC), SIZES, ROOM) == []


def test_more_tokens_than_kernels_take_or_sequences_hold_are_left_out() -> None:
    class Few(TableKernels):
        def largest_prompt(self, num_sequences: int, num_q_heads: int) -> int:
            return 5

    assert [one.size for one in prompt_buffers(make_cache(Few), SIZES, ROOM)] == [4]
    assert [one.size for one in prompt_buffers(make_cache(), [40, 120, 121], ROOM)] == [40, 120]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    cache = make_cache()
    (prompts,) = prompt_buffers(cache, [4], 2)
    cache.add_sequence(4)
    cache.enable_sliding_window(4, 8, 2)
    for sequences, counts, tokens, rows, message in (
        ([0, 1, 2], [1, 1, 1], 3, 0, "3 sequences and 3 tokens; the buffers are Limits"),
        ([0], [5], 5, 1, "1 sequences and 5 tokens"),
        ([0], [3], 3, 3, r"shapes \[\(3,\), \(3,\)\]"),
        ([0], [3], 2, 1, r"shapes \[\(2,\), \(1,\)\]"),
        ([0], [0], 0, 0, "append_lengths has 0"),
        ([0, 4], [1, 1], 2, 0, "a sequence that slides; graph buffers with limits.sliding"),
        ([9], [1], 1, 0, "9"),
    ):
        batch = Batch(sequences, counts, push=False)
        with pytest.raises(InvalidArgument, match=message):
            cache.begin(batch, prompts, [np.zeros(tokens, np.int64), np.zeros(rows, np.int64)])
    assert [cache.num_tokens(sequence) for sequence in range(5)] == [*LENGTHS, 0]
