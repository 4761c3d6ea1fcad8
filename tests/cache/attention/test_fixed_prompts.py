"""Forwards of prompts over fixed arrays against plain ones: padding stores nothing, what does not fit is refused."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tests.cache.attention.test_fixed_batch import (
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

SIZES, ROOM = [4, 11], 3
NOTHING = np.zeros(0, np.int64)
Forwards = list[dict[int, int]]


def forwards() -> st.SearchStrategy[Forwards]:
    """Of each forward some sequences, in any order, and how many tokens they get, SIZES[-1] at most."""
    counts = st.dictionaries(st.integers(0, len(LENGTHS) - 1), st.integers(1, 8), min_size=1, max_size=ROOM)
    return st.lists(counts.filter(lambda one: sum(one.values()) <= SIZES[-1]), min_size=1, max_size=5)


@settings(deadline=None)
@given(forwards())
def test_forwards_equal_plain_ones(program: Forwards) -> None:
    fixed, plain = make_cache(), make_cache()
    small, large = fixed.fixed_prompts(SIZES, ROOM, num_q_heads=4)
    for step, counts in enumerate(program):
        total = sum(counts.values())
        if max(map(fixed.num_tokens, counts)) + total > 40:
            break
        prompts, inputs = small if total <= small.size else large, draw(total, seed=step)
        ids, rows = np.arange(total) + 7, np.cumsum(list(counts.values())) - 1
        fixed.begin_prompts(prompts, list(counts), list(counts.values()), ids, rows)
        assert prompts.token_ids[:total].tolist() == ids.tolist()
        assert prompts.last_rows[: len(counts)].tolist() == rows.tolist()
        expected = run_forward(plain, list(counts), list(counts.values()), inputs)
        actual = run(prompts.attention().attend, padded(inputs, prompts.size))
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours[:total], theirs)
    for ours, theirs in zip(contents(fixed), contents(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_a_cleared_forward_touches_no_page() -> None:
    cache = make_cache()
    for prompts in cache.fixed_prompts(SIZES, ROOM, num_q_heads=4):
        before = contents(cache)
        prompts.clear()
        run(prompts.attention().attend, draw(prompts.size, seed=1))
        assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))


def test_what_is_marked_is_left_to_be_sent_afterwards() -> None:
    cache = make_cache()
    (prompts,) = cache.fixed_prompts([4], ROOM, num_q_heads=4)
    cache.mark_send(0, 0, PositionMap(0, (SlotRuns.from_slots(range(7)),) * 2), 1)
    cache.begin_prompts(prompts, [0], [4], np.zeros(4, np.int64), NOTHING)
    assert cache.num_sent(0) == 0
    run(prompts.attention().attend, draw(4, seed=0))
    cache.send_cached(0)
    assert cache.sends_done(0)


def test_there_are_none_where_kernels_or_rope_cannot() -> None:
    assert make_cache(TorchKernels).fixed_prompts(SIZES, ROOM, num_q_heads=4) == []
    assert make_cache(rope=DYNAMIC).fixed_prompts(SIZES, ROOM, num_q_heads=4) == []


def test_more_tokens_than_kernels_take_or_sequences_hold_are_left_out() -> None:
    class Few(TableKernels):
        def most_prompt_tokens(self, num_sequences: int, num_q_heads: int) -> int:
            return 5

    assert [one.size for one in make_cache(Few).fixed_prompts(SIZES, ROOM, num_q_heads=4)] == [4]
    assert [one.size for one in make_cache().fixed_prompts([40, 120, 121], ROOM, num_q_heads=4)] == [40, 120]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    cache = make_cache()
    (prompts,) = cache.fixed_prompts([4], 2, num_q_heads=4)
    cache.add_sequence(4)
    cache.enable_sliding_window(4, 8, 2)
    begin = partial(cache.begin_prompts, prompts)
    for sequences, counts, tokens, rows, message in (
        ([0, 1, 2], [1, 1, 1], 3, 0, r"\(3, 0, 3\) sequences, rows with logits and tokens; at most \(2, 2, 4\) fit"),
        ([0], [5], 5, 1, r"\(1, 1, 5\) sequences"),
        ([0], [3], 3, 3, r"\(1, 3, 3\) sequences"),
        ([0], [3], 2, 1, r"token_ids has shape \(2,\); append_lengths asks for \(3,\)"),
        ([0], [0], 0, 0, "append_lengths has 0"),
        ([0, 4], [1, 1], 2, 0, "a sequence that slides; fixed arrays take only others"),
        ([9], [1], 1, 0, "9"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            begin(sequences, counts, np.zeros(tokens, np.int64), np.zeros(rows, np.int64))
    assert [cache.num_tokens(sequence) for sequence in range(5)] == [*LENGTHS, 0]
