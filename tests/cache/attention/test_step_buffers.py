"""Decode steps in graph buffers against plain forwards: padding stores nothing and changes nothing."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers, pad_tables
from tandem.cache.kernels.base import KernelFactory, Limits
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.position_map import PositionMap, SlotRuns
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import ALL, Chunk, Span, Window
from tandem.cache.plan.tables import PageTables
from tests.cache.island import forward
from tests.cache.naive import cache_of, layout_of, spanned, windowed
from tests.cache.peer_writer import PeerWriter
from tests.cache.sharing_kernels import sharing_all
from tests.cache.table_kernels import TableKernels
from tests.support.tvm_cache import TvmCache
from tests.transfer.layouts import two_groups

HEADS = {0: (4, 2, 8), 1: (2, 1, 4), 2: (4, 2, 8)}  # of q, of K and V, head_dim by layer
LENGTHS = (3, 8, 5, 13)  # before the first step; pages hold 4
DYNAMIC = RopeParameters("dynamic", 4, factor=2.0, max_position_embeddings=8)


def make_cache(
    kernels: KernelFactory = TableKernels, rope: RopeParameters | None = None, layout: KVLayout | None = None
) -> TvmCache:
    layout = layout or two_groups()
    pools = [torch.full((40, *layout.page_shape(group)), torch.nan) for group in range(2)]
    rope = rope or RopeParameters("default", 4)
    cache = TvmCache(
        layout,
        pools,
        max_sequences=8,
        max_sequence_length=40,
        rope=rope,
        writer=PeerWriter(0, [tuple(pools)] * 2),
        kernels=kernels,
    )
    for sequence, length in enumerate(LENGTHS):
        cache.add_sequence(sequence)
        run_forward(cache, [sequence], [length], draw(length, seed=sequence))
    return cache


def step_buffers(cache: TvmCache, sizes: list[int], num_inputs: int, *, sharing: bool = False) -> list[GraphBuffers]:
    return cache.graph_buffers([Limits.of_step(size, 4, num_inputs, sharing=sharing) for size in sizes])


def draw(num_tokens: int, seed: int) -> dict[int, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return {
        layer: [torch.randn(num_tokens, heads, dim, generator=generator) for heads in (q_heads, kv_heads, kv_heads)]
        for layer, (q_heads, kv_heads, dim) in HEADS.items()
    }


def padded(inputs: dict[int, list[Tensor]], size: int) -> dict[int, list[Tensor]]:
    """Rows of large numbers that must not get anywhere."""
    return {
        layer: [torch.cat((one, torch.full((size - one.shape[0], *one.shape[1:]), 1e30))) for one in tensors]
        for layer, tensors in inputs.items()
    }


@torch.inference_mode()
def run(attention: Callable[..., Tensor], inputs: dict[int, list[Tensor]]) -> list[Tensor]:
    return [attention(layer, *tensors) for layer, tensors in inputs.items()]


def run_forward(
    cache: TvmCache, sequences: list[int], counts: list[int], inputs: dict[int, list[Tensor]]
) -> list[Tensor]:
    return run(partial(cache.attention, cache.begin_forward(sequences, counts)), inputs)


def contents(cache: TvmCache) -> list[Tensor]:
    return [torch.stack(kv) for s in range(len(LENGTHS)) for kv in cache.gather_kv(s, 0, cache.num_tokens(s))]


def test_steps_equal_those_of_plain_forwards() -> None:
    fixed, plain = make_cache(), make_cache()
    small, large = step_buffers(fixed, [2, 4], 2)
    steps = {batch: batch.attention() for batch in (small, large)}
    for step, sequences in enumerate(([2], [0, 1], [3, 1, 0], [0, 1, 2, 3], [1], [3, 2], [2, 0, 1])):
        batch = small if len(sequences) <= 2 else large
        inputs = draw(len(sequences), seed=10 + step)
        extra = np.array(sequences)
        fixed.begin(Batch(sequences), batch, [extra, -extra])
        assert batch.inputs[0].tolist()[: len(sequences)] == sequences
        assert batch.inputs[1].tolist()[: len(sequences)] == (-extra).tolist()
        # The rotation is computed anew, as a graph does when it is replayed.
        steps[batch] = batch.attention()
        expected = run_forward(plain, sequences, [1] * len(sequences), inputs)
        actual = run(steps[batch].attend, padded(inputs, batch.size))
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours[: len(sequences)], theirs)
    for ours, theirs in zip(contents(fixed), contents(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_a_chain_of_steps_equals_plain_forwards() -> None:
    """It is planned for its last step, of sequences that are shorter than was planned, each by another number."""
    fixed, plain = (make_cache() for _ in range(2))
    (batch,) = fixed.graph_buffers([Limits.of_chain(5, 4, 1)])
    for seed, planned in enumerate(({2: 4, 0: 1, 3: 2}, {1: 5}, {3: 1, 2: 3, 1: 2, 0: 4})):
        sequences, counts = list(planned), torch.tensor(list(planned.values()))
        surplus = torch.arange(len(sequences))
        for sequence, too_many in zip(sequences, surplus.tolist(), strict=True):
            fixed.begin(Batch([sequence], [too_many])) if too_many else None
        fixed.begin(Batch(sequences, counts.numpy()), batch, [counts.numpy()])
        for number in range(int(counts.max())):
            rows = (counts > number).nonzero().flatten()
            by = counts - 1 + surplus if number == 0 else -(counts > number).long()
            shift = torch.cat((by, torch.zeros(5 - len(sequences), dtype=torch.long))).int()
            attention = batch.attention(shift=lambda shift=shift: shift, fetched=number > 0)
            inputs = draw(len(sequences), seed=20 * seed + number)
            of_rows = {layer: [one[rows] for one in given] for layer, given in inputs.items()}
            expected = run_forward(plain, [sequences[row] for row in rows], [1] * len(rows), of_rows)
            actual = run(attention.attend, padded(inputs, batch.size))
            for ours, theirs in zip(actual, expected, strict=True):
                torch.testing.assert_close(ours[rows], theirs)
        for sequence, too_many in zip(sequences, surplus.tolist(), strict=True):
            fixed.pop(sequence, 1 + too_many)
            plain.pop(sequence, 1)
    for ours, theirs in zip(contents(fixed), contents(plain), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("spans", [(ALL, ALL), (Window(6), ALL), (Window(2), Chunk(8))], ids=["all", "window", "chunk"])
def test_verify_steps_equal_those_of_plain_forwards(spans: tuple[Span, Span]) -> None:
    """New tokens of a sequence are rows of their own. Some are taken back."""
    fixed, plain = (make_cache(layout=spanned(two_groups(), *spans)) for _ in range(2))
    (batch,) = fixed.graph_buffers([Limits.of_verification(9, 4, 1)])
    for step, appends in enumerate(({2: 4}, {0: 1, 1: 3, 3: 5}, {3: 9}, {1: 1, 0: 2}, {0: 1, 1: 1, 2: 1, 3: 1})):
        sequences, counts = list(appends), list(appends.values())
        total = sum(counts)
        inputs = draw(total, seed=10 + step)
        ends = [fixed.num_tokens(sequence) % 8 for sequence in sequences]
        fixed.begin(Batch(sequences, counts), batch, [np.arange(total)])
        if spans[1] == Chunk(8):
            places = [(one, end + one) for count, end in zip(counts, ends, strict=True) for one in range(count)]
            found = [one.tolist()[:total] for tables in batch._tables if (one := tables.preceding) is not None]
            assert found[1] == [min(one, place % 8) for one, place in places], "none of another chunk"
            assert found[0] == [one for one, _ in places]
        expected = run_forward(plain, sequences, counts, inputs)
        actual = run(batch.attention().attend, padded(inputs, batch.size))
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours[:total], theirs)
        for sequence, count in appends.items():
            fixed.pop(sequence, count // 2)
            plain.pop(sequence, count // 2)
    for ours, theirs in zip(contents(fixed), contents(plain), strict=True) if spans == (ALL, ALL) else ():
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("received", [6, 8], ids=["within a page", "at its end"])
def test_a_step_that_was_foreseen_equals_that_of_a_plain_forward(received: int) -> None:
    fixed, plain = make_cache(), make_cache()
    (batch,) = step_buffers(fixed, [2], 2)
    for cache in (fixed, plain):
        cache.add_sequence(4)
        cache.reserve(4, 16, 3)
        cache.prepare_receive(4, received)
        for pool in cache._receptions.memory:
            pool.nan_to_num_(0.5)
    forward = fixed.foresee(batch, [4], [np.array([1]), np.array([2])])
    assert forward is not None
    inputs = draw(1, seed=3)
    assert forward.is_next is not None
    assert not forward.is_next()  # it has not landed
    for cache in (fixed, plain):
        cache.finish_receive(4)
    assert forward.is_next()
    batch.send([np.array([7])])
    assert (int(batch.inputs[0][0]), int(batch.inputs[1][0])) == (7, 2)
    outputs = run(batch.attention().attend, padded(inputs, 2))
    assert fixed.num_tokens(4) == received
    fixed.commit(forward)
    expected = run_forward(plain, [4], [1], inputs)
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours[:1], theirs)
    for ours, theirs in zip(fixed.gather_kv(4, 0, received + 1), plain.gather_kv(4, 0, received + 1), strict=True):
        assert torch.equal(torch.stack(ours), torch.stack(theirs))
    assert not forward.is_next()  # it was taken


@pytest.mark.parametrize("change", ["pop", "remove", "step"])
def test_what_changed_since_is_not_stepped_as_foreseen(change: str) -> None:
    cache = make_cache()
    (batch,) = step_buffers(cache, [2], 0)
    cache.add_sequence(4)
    cache.reserve(4, 16, 3)
    cache.prepare_receive(4, 6)
    forward = cache.foresee(batch, [4], [])
    assert forward is not None
    cache.finish_receive(4)
    if change == "step":
        cache.begin(Batch([4]), batch, [])
    elif change == "pop":
        cache.pop(4, 1)
    else:
        cache.remove_sequence(4)
        cache.add_sequence(4)
    assert forward.is_next is not None
    assert not forward.is_next()


def test_nothing_is_foreseen_without_pages_set_aside() -> None:
    cache = make_cache()
    (batch,) = step_buffers(cache, [2], 0)
    cache.add_sequence(4)
    cache.prepare_receive(4, 8)
    assert cache.foresee(batch, [4], []) is None


def test_steps_whose_rows_share_pages() -> None:
    """Sharing batches beside others: forks in one, nothing in common in another."""
    fixed, plain = make_cache(sharing_all(TableKernels)), make_cache()
    for cache in (fixed, plain):
        for child, (parent, position) in enumerate([(3, 12), (3, 13), (1, 8), (1, 5)], start=len(LENGTHS)):
            cache.fork_sequence(parent, child, position)
    (batch,) = step_buffers(fixed, [8], 0)
    (sharing,) = step_buffers(fixed, [8], 0, sharing=True)
    (without,) = step_buffers(plain, [8], 0)
    assert not without.pays_to_share([3, 4])  # too little, by the rule of the kernels
    sharing.clear()
    chosen = []
    for step, sequences in enumerate(([3, 4], [0, 2], [4, 0, 5, 3], [1, 3, 4, 5, 6, 7], [3, 0, 4], [7, 6, 1])):
        pays = sharing.pays_to_share(sequences)
        chosen.append(pays)
        inputs = draw(len(sequences), seed=30 + step)
        fixed.begin(Batch(sequences), sharing if pays else batch, [])
        attention = (sharing if pays else batch).attention()
        expected = run_forward(plain, sequences, [1] * len(sequences), inputs)
        for ours, theirs in zip(run(attention.attend, padded(inputs, 8)), expected, strict=True):
            torch.testing.assert_close(ours[: len(sequences)], theirs)
    assert chosen == [True, False, True, True, True, True]
    for ours, theirs in zip(contents(fixed), contents(plain), strict=True):
        assert torch.equal(ours, theirs)


def test_an_empty_batch_touches_no_page() -> None:
    cache = make_cache()
    (batch,) = step_buffers(cache, [3], 0)
    before = contents(cache)
    batch.clear()
    run(batch.attention().attend, draw(3, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(before, contents(cache), strict=True))


def test_padding_follows_the_tables() -> None:
    arrays = [np.array(one, np.int32) for one in ([9, 21], [0, 3, 4], [7, 5, 2, 5], [2, 2], [10, 2])]
    slots, indptr, indices, last_page_len, lengths = arrays
    tables = PageTables(slots, indptr, indices, last_page_len, lengths)
    more = pad_tables(tables, 2, 2, 1)
    assert more.slot_mapping.tolist() == [9, 21, -1, -1]
    assert more.kv_indptr.tolist() == [0, 3, 4, 5, 6]
    assert more.kv_indices.tolist() == [7, 5, 2, 5, 0, 0]
    assert more.kv_last_page_len.tolist() == [2, 2, 1, 1]
    assert more.kv_lens.tolist() == [10, 2, 1, 1]
    arrays = [array for array in vars(more).values() if isinstance(array, np.ndarray)]
    assert len(arrays) == 5
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


@pytest.mark.parametrize(("kernels", "rope"), [(TorchKernels, None), (TableKernels, DYNAMIC)], ids=["torch", "dynamic"])
def test_there_are_none_where_kernels_or_rope_cannot(kernels: type[TorchKernels], rope: RopeParameters | None) -> None:
    assert step_buffers(make_cache(kernels, rope), [2], 0) == []


def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    cache = make_cache()
    (batch,) = step_buffers(cache, [2], 0)
    with pytest.raises(InvalidArgument, match="the batch has 3 sequences and 3 tokens"):
        cache.begin(Batch([0, 1, 2]), batch, [])
    (batch,) = step_buffers(cache, [2], 1)
    for inputs in ([], [np.zeros(1, np.int64)], [np.zeros(2, np.int64)] * 2):
        with pytest.raises(InvalidArgument, match=r"inputs has shapes .* for 2 sequences and 2 tokens"):
            cache.begin(Batch([0, 1]), batch, inputs)
    cache.add_sequence(4)
    cache.enable_sliding_window(4, 8, 2)
    cache.mark_send(0, 0, PositionMap(0, (SlotRuns.from_slots(range(9)),) * 2), 1)
    messages = "slides; graph buffers with limits.sliding", "is being sent; graph buffers push nothing"
    for sequence, message in zip((4, 0), messages, strict=True):
        with pytest.raises(InvalidArgument, match=f"seq_ids has a sequence that {message}"):
            cache.begin(Batch([1, sequence]), batch, [np.zeros(2, np.int64)])
    assert [cache.num_tokens(sequence) for sequence in range(5)] == [*LENGTHS, 0]


def test_what_the_step_before_sees_stays() -> None:
    """It may still run when the next one is begun: with a window, its first page is dropped a step later."""
    layout, size, window = windowed(layout_of(2), 6), 4, 6
    cache = cache_of(layout, kernels=TableKernels)
    cache.add_sequence(0)
    forward(cache, 0, 9)
    (batch,) = step_buffers(cache, [1], 0)
    for length in range(9, 30):
        cache.begin(Batch([0]), batch, [])
        assert cache.first_position(0) == max((length - 1) // size * size - (window - 1), 0) // size * size


@pytest.mark.parametrize("after", [False, True])
def test_sequences_slide_in_graph_buffers(after: bool) -> None:
    """Sequence 0 begins to slide with what it holds. Sequence 5 is a fork with a shared sink, and another sequence does
    not slide."""
    fixed, plain = make_cache(), make_cache()
    for cache in (fixed, plain):
        cache.enable_sliding_window(0, 9, 2, evict_after=after)
        cache.fork_sequence(3, 5, 8)
        cache.enable_sliding_window(5, 10, 6, evict_after=after)
        cache.add_sequence(6)
        cache.enable_sliding_window(6, 8, 3, evict_after=after)
    (batch,) = fixed.graph_buffers([Limits.of_step(5, 4, 1, sliding=True)])
    for step in range(24):
        sequences = [(6, 0, 1, 5), (0, 5, 6), (1, 6)][step % 3] if step < 12 else (5, 0, 6)
        inputs = draw(len(sequences), seed=50 + step)
        fixed.begin(Batch(sequences), batch, [np.array(sequences)])
        expected = run_forward(plain, list(sequences), [1] * len(sequences), inputs)
        attention, rows = batch.attention(), padded(inputs, batch.size)
        actual = run(attention.attend, rows)
        for layer, ours, theirs in zip(sorted(rows), actual, expected, strict=True):
            torch.testing.assert_close(ours[: len(sequences)], theirs)
            read = attention.read(layer, rows[layer][0])  # of what has just been stored
            assert torch.equal(read[: len(sequences)], ours[: len(sequences)])
        assert fixed.num_free_pages <= plain.num_free_pages  # what the step before sees is there for another step
    for cache in (fixed, plain):
        cache.clear()
    assert fixed.num_free_pages == plain.num_free_pages == 40


def test_arrays_are_packed_as_counted() -> None:
    assert GraphBuffers.num_bytes(Limits.of_step(3, 4, 1), [ALL], max_pages=5) == 32 + 32 + 16 + 16 + 16 + 64
