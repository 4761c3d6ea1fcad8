"""Layer groups that attend in chunks: what is attended to, held, shared, sent and refused."""

import numpy as np
import pytest
import torch

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.base import KernelFactory, Limits
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.local_chunks import split_by_chunks
from tandem.cache.plan.spans import ALL, Chunk
from tandem.cache.plan.tables import lay_out_tokens
from tandem.transfer.wire_map import decode_map, encode_map
from tests.cache.island import Island
from tests.cache.naive import HEAD_DIM, NaiveCache, assert_same_kv, cache_of, draw_inputs, layout_of, run, spanned
from tests.cache.table_kernels import TableKernels
from tests.support.tolerances import assert_close

BOTH = spanned(layout_of(2, 1), ALL, Chunk(8))
CHUNKED = spanned(layout_of(2), Chunk(8))


@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
@pytest.mark.parametrize("chunk", [4, 8, 20])
def test_prompts_and_decodes_over_borders(chunk: int, kernels: KernelFactory) -> None:
    layout = spanned(layout_of(2, 1), ALL, Chunk(chunk))
    cache, naive = cache_of(layout, 160, kernels=kernels), NaiveCache(layout)
    for sequence in range(3):
        cache.add_sequence(sequence)
        naive.add(sequence)
    for step, appends in enumerate([{0: 31, 1: 5, 2: 8}, {0: 1, 1: 3, 2: 1}, {1: 17, 0: 1}, *[{0: 1, 1: 1, 2: 1}] * 9]):
        batch = (list(appends), list(appends.values()), draw_inputs(layout, sum(appends.values()), seed=step))
        for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)


def test_a_forward_is_split_at_the_borders() -> None:
    tokens = lay_out_tokens(np.array([6, 8, 3]), np.array([11, 8, 1]))
    rows, parts = split_by_chunks(np.array([5, 2, 7]), tokens, 8)
    assert rows.tolist() == [5, 5, 5, 2, 7]
    assert parts.qo_indptr.tolist() == [0, 2, 10, 11, 19, 20]
    assert parts.seq_lens.tolist() == [8, 16, 17, 16, 4]
    assert parts.positions is tokens.positions
    assert parts.owners.tolist() == [0] * 2 + [1] * 8 + [2] + [3] * 8 + [4]
    plain = lay_out_tokens(np.array([8, 0]), np.array([8, 2]))
    assert split_by_chunks(np.array([5, 2]), plain, 8)[1] is plain


def test_a_chunk_leaves_as_a_whole_when_the_next_begins() -> None:
    cache = cache_of(CHUNKED, num_pages=16)
    cache.add_sequence(0)
    held = []
    for _ in range(20):
        run(cache, [0], [1], draw_inputs(CHUNKED, 1, seed=0))
        held.append(16 - cache.pages.free)
    assert held == [position % 8 // 4 + 1 for position in range(20)]
    assert cache.first_position(0) == 16
    assert cache.room(60, 2).needed == (3,)  # the last of a chunk, and the first of the next
    with pytest.raises(InvalidArgument, match=r"have 15 positions, but those before 16 .* it must have at least 16"):
        cache.pop(0, 5)
    cache.pop(0, 4)
    cache.fork_sequence(0, 1)
    assert (cache.num_tokens(1), cache.first_position(1)) == (16, 16)


@pytest.mark.parametrize("length", [16, 21, 24])
def test_a_prefix_is_found_in_the_chunk_that_it_ends_in(length: int) -> None:
    cache, naive = cache_of(BOTH, num_pages=64), NaiveCache(BOTH)
    for sequence in range(2):
        cache.add_sequence(sequence)
        naive.add(sequence)
    tokens = list(range(100, 140))
    for begin, end in ((0, 14), (14, length)):  # the second forward begins in the chunk from 8 on
        batch = ([0], [end - begin], draw_inputs(BOTH, end - begin, seed=begin))
        run(cache, *batch)
        naive.run(*batch)
    cache.publish_prefix(0, tokens[:length])
    for child, (prompt, found) in enumerate([(tokens, length // 4 * 4), (tokens[:15], 12), (tokens[:7], 0)], start=2):
        cache.add_sequence(child)
        assert cache.match_prefix(child, prompt) == found
        naive.fork(0, child, found)
        batch = ([child], [6], draw_inputs(BOTH, 6, seed=child))
        for actual, expected in zip(run(cache, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected)


def test_nothing_is_found_that_was_never_there() -> None:
    """A query after a border needs no page, and would find a page of any tokens."""
    cache = cache_of(CHUNKED)
    cache.add_sequence(0)
    assert cache.match_prefix(0, list(range(30))) == 0


@pytest.mark.parametrize("begin", [0, 2, 14])
@pytest.mark.parametrize("length", [16, 21])
def test_only_the_last_chunk_travels(length: int, begin: int) -> None:
    island = Island.of(BOTH)
    sender, receiver = island.caches
    for cache in island.caches:
        cache.add_sequence(0)
    naive, inputs = NaiveCache(BOTH), draw_inputs(BOTH, length, seed=0)
    naive.add(0)
    if begin:
        run(receiver, [0], [begin], inputs.between(0, begin))
    receiver.reserve(0, 40, 2)
    wire = encode_map(receiver.prepare_receive(0, length - begin), BOTH)
    expected = {"num_pages": (24, 24), "expected_start": begin, "expected_tokens": length - begin}
    position_map = decode_map(wire, BOTH, **expected)
    assert [runs.num_skipped for runs in position_map.runs] == [0, 16 - begin]
    sender.mark_send(0, begin, position_map, 1)
    for first, end in ((0, 11), (11, length)):
        run(sender, [0], [end - first], inputs.between(first, end))
    receiver.finish_receive(0)
    naive.run([0], [length], inputs)
    assert_same_kv(sender, receiver, 0, 0, 16, length)
    assert sender.bytes_sent(0) == ((length - begin) * 2 * 2 * 2 + (length - 16) * 2 * 2) * HEAD_DIM * 4
    for step in range(1, 12):
        batch = ([0], [1], draw_inputs(BOTH, 1, seed=step))
        for actual, expected_o in zip(run(receiver, *batch), naive.run(*batch), strict=True):
            assert_close(actual, expected_o)


def test_prompts_in_graph_buffers_cross_borders() -> None:
    cache, plain = (cache_of(BOTH, 64, kernels=TableKernels) for _ in range(2))
    (prompts,) = cache.graph_buffers([Limits.of_prompts(20, 3, 4)])
    (steps,) = cache.graph_buffers([Limits.of_step(3, 4, 1)])
    for one in (cache, plain):
        for sequence in range(3):
            one.add_sequence(sequence)
    for seed, counts in enumerate([{0: 5, 1: 7, 2: 8}, {0: 9, 1: 2}, {2: 20}, *[{0: 1, 1: 1, 2: 1}] * 10]):
        total = sum(counts.values())
        buffers = steps if seed > 2 else prompts
        ids = np.arange(total)
        batch = Batch(list(counts), None if seed > 2 else list(counts.values()), push=False)
        forward = cache.begin(batch, buffers, [ids] if seed > 2 else [ids, ids[:1]])
        inputs, attention = draw_inputs(BOTH, total, seed), buffers.attention()
        padding = (0, 0, 0, 0, 0, buffers.size - total)
        with torch.inference_mode():
            padded = [[torch.nn.functional.pad(x, padding) for x in qkv] for qkv in inputs.layers]
            ours = [attention.attend(layer, q, k, v) for layer, (q, k, v) in enumerate(padded)]
        cache.commit(forward)
        for actual, expected in zip(ours, run(plain, list(counts), list(counts.values()), inputs), strict=True):
            torch.testing.assert_close(actual[:total], expected)


def test_trees_end_with_their_chunk() -> None:
    cache = cache_of(BOTH)
    cache.add_sequence(0)
    run(cache, [0], [13], draw_inputs(BOTH, 13, seed=0))
    tree = r"token_tree_parents\[0\] makes a tree of 4 nodes behind 13 positions"
    message = rf"{tree}; .* 1 keeps chunks of 8, so the tree may have at most 3"
    with pytest.raises(InvalidArgument, match=message):
        cache.begin_forward([0], [4], token_tree_parents=[[-1, 0, 0, 2]])
    run(cache, [0], [3], draw_inputs(BOTH, 3, seed=1), parents=[[-1, 0, 0]])
    cache.commit_token_tree([0], [2])
    assert cache.num_tokens(0) == 15


def test_a_chunk_is_whole_pages() -> None:
    with pytest.raises(
        InvalidArgument, match=r"keeps of group 1 is chunks of 6 positions; it must be a multiple of page_size, 4"
    ):
        spanned(layout_of(2, 1), ALL, Chunk(6))
    with pytest.raises(InvalidArgument, match="size of the chunk is 0; it must be at least 1"):
        Chunk(0)
    assert len({BOTH.fingerprint, spanned(BOTH, ALL, Chunk(4)).fingerprint, spanned(BOTH, ALL, ALL).fingerprint}) == 3
