"""Token trees, against caches in which each path of a tree is a sequence of its own that came token by token."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.cache.kernels.base import Capabilities, KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.token_tree import MAX_NODES, lay_out_trees, unpack_masks, visible_nodes
from tests.cache.naive import (
    HEAD_DIM,
    MAX_LENGTH,
    NaiveCache,
    assert_same_kv,
    cache_of,
    draw_inputs,
    layout_of,
    ropes_of,
    run,
    windowed,
)
from tests.cache.naive_trees import BASE, NaiveTrees, check_kv, draw_parents
from tests.cache.peer_writer import PeerWriter
from tests.cache.settings import LATENTS
from tests.support.tolerances import assert_close

LAYOUT = layout_of(2, 1)
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
both_kernels = pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])


LAYOUTS = {
    "two groups": LAYOUT,
    "MHA": layout_of(4),
    "page of 1": layout_of(2, page_size=1),
    "page of 16": layout_of(2, page_size=16),
    "bfloat16": layout_of(2, dtype=torch.bfloat16),
    "fp8": replace(layout_of(2), scales=KVScales.uniform(2, 1 / 64, 1 / 128)),
    "windows of 5 and all": windowed(LAYOUT, 5, None),
    "windows of 1 and 3": windowed(LAYOUT, 1, 3),
    "window, page of 1": windowed(layout_of(2, page_size=1), 4),
    "latents": LATENTS,
}


@both_kernels
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_trees_beside_plain_sequences(layout: KVLayout, kernels: KernelFactory) -> None:
    """Trees of several shapes, one after nothing, that grow over forwards; then commits, and plain forwards again."""
    cache = cache_of(layout, 200, rope=ropes_of(layout), kernels=kernels)
    naive = NaiveCache(layout, ropes_of(layout))
    trees = NaiveTrees(naive)
    for sequence in range(5):
        cache.add_sequence(sequence)
        naive.add(sequence)
    steps: list[dict[int, list[int] | int]] = [
        {0: 6, 1: 3, 2: 9, 3: 1},
        {0: [-1, 0, 0, 1, 1, 2], 1: 1, 2: [-1, -1, -1], 4: [-1, 0]},
        {4: [1], 0: [3, 0, -1], 3: 5, 2: [0]},
        {1: 1, 0: [8], 3: 1},
    ]
    for step, appends in enumerate(steps):
        parents = [of if isinstance(of, list) else None for of in appends.values()]
        lengths = [len(of) if isinstance(of, list) else of for of in appends.values()]
        inputs = draw_inputs(layout, sum(lengths), seed=step)
        actual = run(cache, list(appends), lengths, inputs, parents=parents)
        for own, expected in zip(actual, trees.run(list(appends), parents, lengths, inputs), strict=True):
            assert_close(own, expected)
    cache.commit_token_tree([0, 4, 2], [9, -1, 2])
    for sequence, leaf in ((0, 9), (4, -1), (2, 2)):
        trees.commit(sequence, leaf)
    for sequence in range(5):
        check_kv(cache, naive, sequence)
    inputs = draw_inputs(layout, 9, seed=9)
    batch = (list(range(5)), [1, 2, 1, 1, 4], inputs)
    for own, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
        assert_close(own, expected)
    cache.clear()
    assert cache.num_free_pages == 200


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("rope_type", ["none", "dynamic", "longrope"])
def test_with_what_else_attention_does(rope_type: str, sinks: Tensor | None, softcap: float | None) -> None:
    """RoPE by length crosses its trained length within the tree."""
    factors = (1.0,) * (HEAD_DIM // 2)
    rope = RopeParameters(
        rope_type,
        HEAD_DIM,
        factor=2.0,
        max_position_embeddings=8,
        original_max_position_embeddings=8,
        short_factor=factors,
        long_factor=tuple(2 * factor for factor in factors),
    )
    cache, naive = cache_of(LAYOUT, rope=rope, softcap=softcap), NaiveCache(LAYOUT, rope, softcap=softcap, sinks=sinks)
    trees = NaiveTrees(naive)
    cache.add_sequence(0)
    naive.add(0)
    for step, added in enumerate(([-1, 0, 1, 1, 2], [4, 5, 5, 6], [8, -1])):
        if step == 0:
            inputs = draw_inputs(LAYOUT, 4, seed=7)
            run(cache, [0], [4], inputs, sinks)
            naive.run([0], [4], inputs)
        inputs = draw_inputs(LAYOUT, len(added), seed=step)
        actual = run(cache, [0], [len(added)], inputs, sinks, [added])
        for own, expected in zip(actual, trees.run([0], [added], [len(added)], inputs), strict=True):
            assert_close(own, expected)
    cache.commit_token_tree([0], [9])
    trees.commit(0, 9)
    check_kv(cache, naive, 0)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_random_trees(seed: int) -> None:
    random = Random(seed)
    layout = random.choice([LAYOUT, windowed(LAYOUT, random.randint(1, 9), None)])
    cache, trees = cache_of(layout, 64), NaiveTrees(NaiveCache(layout))
    for sequence in range(3):
        cache.add_sequence(sequence)
        trees.naive.add(sequence)
    for step in range(8):
        batch = random.sample(range(3), random.randint(1, 3))
        parents: list[list[int] | None] = []
        for sequence in batch:
            open_nodes = len(trees.parents.get(sequence, []))
            plain = not open_nodes and random.random() < 0.4
            parents.append(None if plain else draw_parents(random, open_nodes, random.randint(1, 4)))
        lengths = [random.randint(1, 3) if added is None else len(added) for added in parents]
        inputs = draw_inputs(layout, sum(lengths), seed=step)
        actual = run(cache, batch, lengths, inputs, parents=parents)
        for own, expected in zip(actual, trees.run(batch, parents, lengths, inputs), strict=True):
            assert_close(own, expected)
        for sequence, tree in list(trees.parents.items()):
            if random.random() < 0.3:
                count = random.randint(0, len(tree) - 1)
                cache.pop(sequence, count)
                trees.pop(sequence, count)
        ended = [sequence for sequence in trees.parents if random.random() < 0.4]
        leaves = [random.randint(-1, len(trees.parents[sequence]) - 1) for sequence in ended]
        if ended:
            cache.commit_token_tree(ended, leaves)
        for sequence, leaf in zip(ended, leaves, strict=True):
            trees.commit(sequence, leaf)
            check_kv(cache, trees.naive, sequence)
    cache.clear()
    assert cache.num_free_pages == 64


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    window=st.integers(1, 50) | st.none(),
    seed=st.integers(0, 2**32),
)
def test_masks_are_the_nearest_ancestors(sizes: list[int], window: int | None, seed: int) -> None:
    random = Random(seed)
    trees = [draw_parents(random, 0, size) for size in sizes]
    masks = visible_nodes([np.array(parents) for parents in trees], window)
    rows = iter(masks)
    for parents in trees:
        for node in range(len(parents)):
            seen, ancestor = set[int](), node
            while ancestor != BASE and len(seen) != window:
                seen.add(ancestor)
                ancestor = parents[ancestor]
            assert set(np.flatnonzero(unpack_masks(next(rows)[None], MAX_NODES)[0]).tolist()) == seen


def test_the_largest_tree() -> None:
    parents = np.arange(-1, MAX_NODES - 1)
    trees = lay_out_trees(np.array([1]), [parents], np.array([0, 3, 4], np.int32))
    assert (trees.tokens.tolist(), trees.depths.tolist()) == ([3], [MAX_NODES - 1])
    assert (trees.masks == 2**32 - 1).all()


def test_a_forks_pages_are_not_touched() -> None:
    """The tree of one stands where the partial page that it shared was."""
    cache, naive = cache_of(LAYOUT), NaiveCache(LAYOUT)
    cache.add_sequence(0)
    naive.add(0)
    inputs = draw_inputs(LAYOUT, 6, seed=0)
    run(cache, [0], [6], inputs)
    naive.run([0], [6], inputs)
    cache.fork_sequence(0, 1)
    naive.fork(0, 1, 6)
    run(cache, [0], [3], draw_inputs(LAYOUT, 3, seed=1), parents=[[-1, -1, 1]])
    cache.commit_token_tree([0], [2])
    assert cache.num_tokens(0) == 8
    check_kv(cache, naive, 1)


def test_a_tree_on_what_was_received() -> None:
    """Positions sent and landed, then a tree after them on the receiver's side; it is not sent on."""
    pools = [tuple(torch.full((32, *LAYOUT.page_shape(g)), torch.nan) for g in range(2)) for _ in range(2)]
    sender, receiver = (cache_of(LAYOUT, pools=own, writer=PeerWriter(pe, pools)) for pe, own in enumerate(pools))
    naive = NaiveCache(LAYOUT)
    trees = NaiveTrees(naive)
    naive.add(0)
    for cache in (sender, receiver):
        cache.add_sequence(0)
    position_map = receiver.prepare_receive(0, 7)
    with pytest.raises(InvalidArgument, match="sequence 0 is being received"):
        receiver.begin_forward([0], [1], token_tree_parents=[[-1]])
    sender.mark_send(0, 0, position_map, 1)
    with pytest.raises(InvalidArgument, match="sequence 0 is being sent"):
        sender.begin_forward([0], [1], token_tree_parents=[[-1]])
    inputs = draw_inputs(LAYOUT, 7, seed=0)
    run(sender, [0], [7], inputs)
    naive.run([0], [7], inputs)
    receiver.finish_receive(0)
    added = [-1, 0, 0, 2]
    inputs = draw_inputs(LAYOUT, 4, seed=1)
    actual = run(receiver, [0], [4], inputs, parents=[added])
    for own, expected in zip(actual, trees.run([0], [added], [4], inputs), strict=True):
        assert_close(own, expected)
    receiver.commit_token_tree([0], [3])
    trees.commit(0, 3)
    check_kv(receiver, naive, 0)
    run(sender, [0], [1], inputs.between(0, 1), parents=[[-1]])  # its map is used up
    assert_same_kv(sender, receiver, 0, 0, 0, 7)


def test_wrong_use_is_refused() -> None:
    cache = cache_of(LAYOUT, 16, writer=PeerWriter(0, []))
    for sequence in (0, 1):
        cache.add_sequence(sequence)
    position_map = cache_of(LAYOUT)
    position_map.add_sequence(0)
    asked = position_map.prepare_receive(0, 9)
    for parents, message in (
        ([[-1]], "token_tree_parents has 1 entries; seq_ids has 2"),
        ([[-1, 0], None], r"token_tree_parents\[0\] has 2 entries; append_lengths\[0\] is 3"),
        ([[-1, 0, 2], None], r"token_tree_parents\[0\] has 2 as parent of node 2; it must be from -1 to 1"),
        ([[-2, 0, 1], None], r"token_tree_parents\[0\] has -2 as parent of node 0; it must be from -1 to -1"),
        ([[-1, 0.5, 1], None], "it must be a row of integers of 64 bits"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            cache.begin_forward([0, 1], [3, 1], token_tree_parents=parents)
    with pytest.raises(OutOfPages):
        cache.begin_forward([0, 1], [3, MAX_LENGTH], token_tree_parents=[[-1, 0, 0], None])
    run(cache, [0], [3], draw_inputs(LAYOUT, 3, seed=0))  # nothing was opened
    with pytest.raises(
        InvalidArgument, match="sequence 0 has no open token tree; token_tree_parents of a batch opens one"
    ):
        cache.commit_token_tree([0], [0])
    run(cache, [0, 1], [3, 2], draw_inputs(LAYOUT, 5, seed=0), parents=[[-1, 0, 1], [-1, -1]])
    free = cache.num_free_pages
    for call in (
        lambda: cache.begin_forward([1, 0], [1, 1]),
        lambda: cache.begin_forward([1, 0], [1, 1], token_tree_parents=[[-1], None]),
        lambda: cache.fork_sequence(0, 5),
        lambda: cache.publish_prefix(0, [1, 2, 3]),
        lambda: cache.prepare_receive(0, 1),
        lambda: cache.mark_send(0, 0, asked, 1),
        lambda: cache.enable_sliding_window(0, 8, 2),
    ):
        with pytest.raises(InvalidArgument, match=r"sequence [01] has an open token tree of [32] nodes"):
            call()
    for leaves, message in (
        ([2, 2], "leaf_indices has 2 for sequence 1; it must be from -1 to 1"),
        ([-2, 0], "leaf_indices has -2 for sequence 0; it must be from -1 to 2"),
        ([0], r"leaf_indices has shape \(1,\); it must be \[B\], B = 2"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            cache.commit_token_tree([0, 1], leaves)
    with pytest.raises(InvalidArgument, match="the open token tree of sequence 0 has 3 nodes"):
        cache.pop(0, 4)
    assert (cache.num_free_pages, cache.num_tokens(0), cache.num_tokens(1)) == (free, 6, 2)
    cache.pop(1, 2)  # all its nodes
    with pytest.raises(InvalidArgument, match="sequence 1 has no open token tree"):
        cache.commit_token_tree([1], [-1])
    cache.remove_sequence(0)
    cache.add_sequence(0)
    run(cache, [0], [1], draw_inputs(LAYOUT, 1, seed=0))  # a new sequence of the same id has no tree


def test_too_many_nodes_are_refused() -> None:
    cache = cache_of(layout_of(1), 100, max_length=300)
    cache.add_sequence(0)
    run(cache, [0], [250], draw_inputs(layout_of(1), 250, seed=0), parents=[list(range(-1, 249))])
    with pytest.raises(InvalidArgument, match="a tree of 257 nodes; it may have at most 256"):
        cache.begin_forward([0], [7], token_tree_parents=[[0] * 7])
    run(cache, [0], [6], draw_inputs(layout_of(1), 6, seed=1), parents=[[0] * 6])


def test_what_takes_no_trees() -> None:
    cache = cache_of(LAYOUT)
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 8, 2)

    class NoTrees(TorchKernels):
        def __init__(self, pool: Tensor, scoring: Scoring, fp8: Any = None) -> None:
            super().__init__(pool, scoring, fp8)
            self.capabilities = Capabilities(trees=False)

    without = cache_of(LAYOUT, kernels=NoTrees)
    without.add_sequence(0)
    for of, message in (
        (cache, "sequence 0 slides"),
        (without, "NoTrees, the backend of layer group 0, takes no token trees"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            of.begin_forward([0], [1], token_tree_parents=[[-1]])
        run(of, [0], [1], draw_inputs(LAYOUT, 1, seed=0))


@pytest.mark.parametrize("seed", range(5))
def test_slots_are_moved_at_once(seed: int) -> None:
    """Chains of moves, each slot's content as it was before; bit for bit."""
    layout = layout_of(2)
    pool = torch.randn(8, *layout.page_shape(0))
    before = pool.clone()
    slots = np.random.default_rng(seed).permutation(32).astype(np.int32)
    sources, targets = np.sort(slots[:20]), np.arange(20, dtype=np.int32)
    TorchKernels(pool, Scoring(1.0)).move_slots(sources, targets)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        before_at, after_at = before[source // 4, ..., source % 4, :], pool[target // 4, ..., target % 4, :]
        assert torch.equal(after_at, before_at)
    assert torch.equal(pool[5:], before[5:])


def test_positions_of_a_tree_count_in_the_order_of_its_nodes() -> None:
    cache = cache_of(LAYOUT, rope=RopeParameters("none", HEAD_DIM))
    cache.add_sequence(0)
    inputs = draw_inputs(LAYOUT, 4, seed=0)
    run(cache, [0], [4], inputs, parents=[[-1, -1, 0, 1]])
    for (k, v), (_, given_k, given_v) in zip(cache.gather_kv(0, 0, 4), inputs.layers, strict=True):
        assert torch.equal(k, given_k)
        assert torch.equal(v, given_v)
