"""Checks what a forward must have done before it is committed, and what its layers are given."""

from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.attention.forward import Batch
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.spans import Sliding
from tests.cache.island import Island
from tests.cache.naive import cache_of, draw_inputs, layout_of, run_layer

LAYOUT = layout_of(2)


@pytest.mark.parametrize("missing", [[0], [1], [0, 1]], ids=str)
@torch.inference_mode()
def test_a_forward_with_a_layer_that_never_ran_is_not_reported_as_sent(missing: list[int]) -> None:
    sender, receiver = Island.of(LAYOUT).caches
    for cache in (sender, receiver):
        cache.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_receive(0, 4), 1)
    forward = sender.begin(Batch([0], [4]))
    inputs = draw_inputs(LAYOUT, 4, seed=0).layers
    for layer in sorted({0, 1}.difference(missing)):
        run_layer(sender, forward, layer, *inputs[layer])
    for end in (sender.commit, sender.end_forward):
        with pytest.raises(InvalidArgument, match=rf"layers \{missing} of the plan never ran"):
            end(forward)
    assert sender.num_sent(0) == 0
    for layer in missing:
        run_layer(sender, forward, layer, *inputs[layer])
    sender.commit(forward)
    assert sender.num_sent(0) == 4


@pytest.mark.parametrize("given", [("q", "k", None), ("q", None, "v"), (None, "k", "v"), ("q", None, None)], ids=str)
def test_attention_of_none_is_refused(given: tuple[Any, ...]) -> None:
    cache = cache_of(LAYOUT)
    cache.add_sequence(0)
    forward = cache.begin_forward([0], [2])
    named = dict(zip("qkv", draw_inputs(LAYOUT, 2, seed=0).layers[0], strict=True))
    missing = "qkv"[given.index(None)]
    with pytest.raises(InvalidArgument, match=f"{missing} is None; "):
        cache.attention(forward, 0, *(named.get(name) for name in given))  # type: ignore[arg-type]


def test_a_second_sliding_window_is_refused_and_changes_nothing() -> None:
    cache = cache_of(LAYOUT)
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 8, 2)
    with pytest.raises(InvalidArgument, match="sequence 0 slides already"):
        cache.enable_sliding_window(0, 9, 3)
    assert cache._table.sliding.sliding(cache._table.row(0)) == Sliding(8, 2)


def test_a_batch_without_lengths_is_a_step() -> None:
    cache = cache_of(LAYOUT)
    for sequence in (3, 5):
        cache.add_sequence(sequence)
    forward = cache.begin(Batch([5, 3]))
    assert np.diff(forward.tokens.qo_indptr).tolist() == [1, 1]
    assert [cache.num_tokens(sequence) for sequence in (3, 5)] == [1, 1]
