"""Layers that read what another has stored, and attention in parts, against the naive cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.base import KernelFactory, Part
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kernels.torch.merging import merge
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.spans import ALL, Chunk
from tests.cache.naive import (
    HEAD_DIM,
    QUERY_HEADS,
    NaiveCache,
    attend,
    cache_of,
    draw_inputs,
    layout_of,
    run,
    run_layer,
    spanned,
    windowed,
)
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

LAYOUT = replace(layout_of(1, 2), readers=((4, 3), (5, 0), (6, 1), (7, 1)))
LAYOUTS = {
    "all": LAYOUT,
    "a window": windowed(LAYOUT, 6, None),
    "chunks": spanned(LAYOUT, Chunk(8), ALL),
    "8 bits": replace(LAYOUT, scales=KVScales.uniform(8, 0.03, 0.04)),
}
KERNELS = [TorchKernels, choose_kernels]
TWO = replace(layout_of(2), readers=((2, 1),))  # layers 0 and 1 store
BATCHES = [([1, 2, 3], [5, 5, 9]), ([1, 2], [1, 1]), ([3, 1, 2], [1, 7, 1]), ([2, 3, 1], [9, 3, 1])]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_readers_attend_to_the_layer_that_they_read(layout: KVLayout, kernels: KernelFactory) -> None:
    """Fresh prompts of like and unlike lengths, decodes, and later chunks beside them."""
    cache, naive = cache_of(layout, kernels=kernels, softcap=3.0), NaiveCache(layout, softcap=3.0)
    for sequence in (1, 2, 3):
        cache.add_sequence(sequence)
        naive.add(sequence)
    for seed, (sequences, lengths) in enumerate(BATCHES):
        inputs = draw_inputs(layout, sum(lengths), seed)
        pairs = zip(run(cache, sequences, lengths, inputs), naive.run(sequences, lengths, inputs), strict=True)
        for o, expected in pairs:
            assert_close(o, expected)


def test_readers_take_no_pages_and_give_the_kv_that_they_read() -> None:
    without = replace(LAYOUT, readers=())
    assert LAYOUT.token_bytes == without.token_bytes
    assert LAYOUT.num_layers == without.num_layers + 4
    assert LAYOUT.fingerprint != without.fingerprint
    cache = cache_of(LAYOUT)
    cache.add_sequence(1)
    run(cache, [1], [9], draw_inputs(LAYOUT, 9, 0))
    found = cache.gather_kv(1, 2, 9)
    for layer, of in LAYOUT.readers:
        assert all(torch.equal(x, y) for x, y in zip(found[layer], found[of], strict=True))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("causal", [True, False])
def test_parts_of_two_layers_merge_to_attention_over_the_keys_of_both(causal: bool, kernels: KernelFactory) -> None:
    cache, naive = cache_of(TWO, kernels=kernels), NaiveCache(TWO)
    for sequence in (1, 2, 3):
        cache.add_sequence(sequence)
        naive.add(sequence)
    for seed, (sequences, lengths) in enumerate(BATCHES):
        inputs = draw_inputs(TWO, sum(lengths), seed)
        naive.run(sequences, lengths, inputs)
        merged, alone = merged_parts(cache, sequences, lengths, inputs.layers, causal=causal)
        queries, begin = inputs.layers[2][0].double(), 0
        for sequence, count in zip(sequences, lengths, strict=True):
            rows, of = slice(begin, begin + count), naive.sequences[sequence]
            positions = torch.arange(of.length - count, of.length)
            q = naive._rotated(2, queries[rows], positions)
            for part, layers in ((alone, [1]), (merged, [0, 1])):
                expected, lse = in_part(q, [of.keys[one] for one in layers], [of.values[one] for one in layers], causal)
                assert_close(part.o[rows], expected)
                assert_close(part.lse[rows], lse)
            begin += count


def merged_parts(
    cache: TvmCache,
    sequences: list[int],
    lengths: list[int],
    layers: list[tuple[Tensor, Tensor, Tensor]],
    *,
    causal: bool,
) -> tuple[Part, Part]:
    """Returns for the reader's q the merged parts of layers 0 and 1, and the part of the layer that it reads."""
    with torch.inference_mode():
        plan = cache.begin_forward(sequences, lengths)
        for layer, tensors in enumerate(layers):
            run_layer(cache, plan, layer, *tensors)
        first, second = (cache.read_part(plan, layer, layers[2][0], causal=causal) for layer in (0, 2))
        cache.end_forward(plan)
    return merge([first, second]), second


def in_part(q: Tensor, keys: list[Tensor], values: list[Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    """o and log-sum-exp of q [n, heads, D] over the K and V [N, kv heads, D] of some layers, each causally or not."""
    count, length = q.shape[0], keys[0].shape[0]
    seen = torch.ones(count, length, dtype=torch.bool).tril(length - count) if causal else torch.ones(count, length) > 0
    scores = [
        torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * HEAD_DIM**-0.5 for k in keys
    ]
    together = torch.cat([one.masked_fill(~seen[:, None], -torch.inf) for one in scores], 2)
    wide = torch.cat([v.repeat_interleave(q.shape[1] // v.shape[1], 1) for v in values])
    return torch.einsum("qhk,khd->qhd", together.softmax(2), wide), together.logsumexp(2)


def test_the_naive_attention_in_parts_is_the_naive_attention() -> None:
    q, k, v = (torch.randn(n, heads, HEAD_DIM).double() for n, heads in ((3, QUERY_HEADS), (7, 2), (7, 2)))
    for causal in (True, False):
        assert_close(in_part(q, [k], [v], causal)[0].float(), attend(q, k, v, causal=causal))


def test_calls_that_are_not_accepted() -> None:
    layout = windowed(LAYOUT, 6, None)
    cache = cache_of(layout)
    cache.add_sequence(1)
    layers = draw_inputs(layout, 5, 0).layers
    plan = cache.begin_forward([1], [5])
    with pytest.raises(InvalidArgument, match="layer is 4, which reads layer 3 and stores nothing"):
        cache.attention(plan, 4, *layers[4])
    with pytest.raises(InvalidArgument, match="layer is 5, but layer 0, which stores what it reads, has not run yet"):
        cache.read(plan, 5, layers[5][0])
    for layer in range(4):
        with pytest.raises(InvalidArgument, match=rf"layers \[{layer}.* never ran"):
            cache.end_forward(plan)
        run_layer(cache, plan, layer, *layers[layer])
    with pytest.raises(InvalidArgument, match=r"q is \(4, 4, 8\) of"):
        cache.read(plan, 5, layers[5][0][:4])
    with pytest.raises(InvalidArgument, match="causal is False, but layer 5 drops its past"):
        cache.read_part(plan, 5, layers[5][0], causal=False)
    with pytest.raises(InvalidArgument, match="parts is empty"):
        merge([])
    part = cache.read_part(plan, 4, layers[4][0])
    with pytest.raises(InvalidArgument, match=r"parts\[1\] has o \(4, 4, 8\)"):
        merge([part, Part(part.o[:4], part.lse[:4])])
    cache.end_forward(plan)  # readers need not run


def test_sequences_that_have_no_parts() -> None:
    cache = cache_of(LAYOUT)
    layers = draw_inputs(LAYOUT, 4, 0).layers
    for sequence in (1, 2):
        cache.add_sequence(sequence)
    cache.enable_sliding_window(1, 8, 2)
    for sequence, parents in ((1, None), (2, [[-1, 0, 0, 1]])):
        plan = cache.begin_forward([sequence], [4], token_tree_parents=parents)
        run_layer(cache, plan, 0, *layers[0])
        with pytest.raises(InvalidArgument, match="sequences that slide or have a token tree"):
            cache.read_part(plan, 0, layers[0][0])


@pytest.mark.parametrize(
    ("readers", "message"),
    [
        (((4, 5), (5, 0)), "readers has .4, 5.: layer 4 would read layer 5; it must be an earlier layer"),
        (((4, 4),), "groups hold|layer 4 would read layer 4"),
        (((5, 0),), "must stand in exactly one group, or read another layer"),
        (((3, 0),), "must stand in exactly one group, or read another layer"),
    ],
)
def test_layouts_that_are_not_accepted(readers: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        replace(layout_of(1, 2), readers=readers)
