"""K and V stored in 8 bits, against a naive cache that rounds each number by the definition of e4m3."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.cache.digest import digest_kv
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import FP8, KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import (
    HEAD_DIM,
    NaiveCache,
    cache_of,
    draw_inputs,
    layout_of,
    pools_of,
    run,
    windowed,
)
from tests.cache.peer_writer import PeerWriter
from tests.cache.plan.test_factors import NO_FACTORS
from tests.cache.rounding import e4m3_values, round_by
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

SCALES = {
    # About what a calibration gives for numbers of this size: the largest become 200.
    "per layer": KVScales(((0.02,), (0.013,)), ((0.017,), (0.031,))),
    "per head": KVScales(((0.02, 0.005), (0.5, 0.013)), ((0.017, 0.4), (0.031, 0.002))),
    # 448 · 0.002 is less than most numbers are.
    "saturating": KVScales.uniform(2, 0.002, 0.002),
}
LAYOUT = layout_of(2)
PROGRAM = ({1: 5}, {1: 1}, {1: 9, 2: 3}, {1: 1, 2: 1}, {2: 6, 1: 1}, {3: 17, 2: 1})


def fp8_layout(scales: KVScales, dtype: torch.dtype = torch.float32) -> KVLayout:
    return replace(LAYOUT, scales=scales, dtype=dtype)


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"scale": 0.1}], ids=str)
@pytest.mark.parametrize("window", [None, 6])
def test_attention(scales: KVScales, options: dict[str, Any], window: int | None) -> None:
    """Fresh prompts, chunks and decodes see what was stored, and nothing finer."""
    layout = windowed(fp8_layout(scales), window)
    cache, naive = cache_of(layout, **options), NaiveCache(layout, **options)
    for step, lengths in enumerate(PROGRAM):
        for sequence in lengths:
            if sequence not in naive.sequences:
                cache.add_sequence(sequence)
                naive.add(sequence)
        inputs = draw_inputs(layout, sum(lengths.values()), seed=step)
        outputs = run(cache, list(lengths), list(lengths.values()), inputs)
        for output, expected in zip(outputs, naive.run(list(lengths), list(lengths.values()), inputs), strict=True):
            assert_close(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_16_bits(dtype: torch.dtype) -> None:
    layout = fp8_layout(SCALES["per head"], dtype)
    cache, naive = cache_of(layout), NaiveCache(layout)
    for one in (cache.add_sequence, naive.add):
        one(1)
    for step, length in enumerate((7, 1, 6)):
        inputs = draw_inputs(layout, length, seed=step)
        for output, expected in zip(run(cache, [1], [length], inputs), naive.run([1], [length], inputs), strict=True):
            assert output.dtype == dtype
            assert_close(output, expected)


def test_learned_sinks() -> None:
    layout, sinks = fp8_layout(SCALES["per head"]), torch.tensor([0.5, -1.0, 2.0, 0.0])
    cache, naive = cache_of(layout), NaiveCache(layout, sinks=sinks)
    for one in (cache.add_sequence, naive.add):
        one(1)
    for step, length in enumerate((9, 1)):
        inputs = draw_inputs(layout, length, seed=step)
        outputs = run(cache, [1], [length], inputs, sinks)
        for output, expected in zip(outputs, naive.run([1], [length], inputs), strict=True):
            assert_close(output, expected)


def test_forks_pops_and_copied_pages() -> None:
    layout = fp8_layout(SCALES["per layer"])
    cache, naive = cache_of(layout), NaiveCache(layout)
    for one in (cache.add_sequence, naive.add):
        one(1)
    first, second = draw_inputs(layout, 11, seed=0), draw_inputs(layout, 8, seed=1)
    run(cache, [1], [11], first)
    naive.run([1], [11], first)
    for one in (cache, naive):
        (one.fork_sequence if isinstance(one, TvmCache) else one.fork)(1, 2, 6)
        one.pop(1, 4)
    outputs, expected = run(cache, [1, 2], [5, 3], second), naive.run([1, 2], [5, 3], second)
    for output, of_naive in zip(outputs, expected, strict=True):
        assert_close(output, of_naive)


def test_a_stream_rounds_k_before_rope() -> None:
    """All that a stream stores is rotated when it is read: the indices equal those in a sequence that never slid."""
    scales = SCALES["per layer"]
    layout, bare = fp8_layout(scales), replace(LAYOUT, scales=None)
    cache, naive = cache_of(layout), NaiveCache(bare)
    cache.add_sequence(1)
    cache.enable_sliding_window(1, window=20, sink=2)
    naive.add(1)
    for step, length in enumerate((6, 1, 4)):
        inputs = draw_inputs(layout, length, seed=step)
        rounded = draw_inputs(layout, length, seed=step)
        rounded.layers = [
            (q, round_by(k.double(), scales.k[layer]), round_by(v.double(), scales.v[layer]))
            for layer, (q, k, v) in enumerate(rounded.layers)
        ]
        for output, expected in zip(run(cache, [1], [length], inputs), naive.run([1], [length], rounded), strict=True):
            assert_close(output, expected)


@pytest.mark.parametrize("rope_type", ["none", "default"])
def test_gathered_kv_is_widened(rope_type: str) -> None:
    rope = RopeParameters(rope_type, HEAD_DIM)
    layout = fp8_layout(SCALES["per head"])
    cache, naive = cache_of(layout, rope=rope), NaiveCache(layout, rope)
    for one in (cache.add_sequence, naive.add):
        one(1)
    inputs = draw_inputs(layout, 10, seed=0)
    run(cache, [1], [10], inputs)
    naive.run([1], [10], inputs)
    for layer, (k, v) in enumerate(cache.gather_kv(1, 2, 9)):
        assert k.dtype == v.dtype == torch.float32
        torch.testing.assert_close(k.double(), naive.sequences[1].keys[layer][2:9], rtol=1e-6, atol=0)
        torch.testing.assert_close(v.double(), naive.sequences[1].values[layer][2:9], rtol=1e-6, atol=0)


@pytest.mark.parametrize("begin", [0, 7])
def test_what_is_sent_is_what_the_sender_stores(begin: int) -> None:
    """Cached positions page to page, the rest token by token; a quarter of the bytes that float32 takes."""
    layout = fp8_layout(SCALES["per head"])
    pools = [pools_of(layout, 16) for _ in range(2)]
    sender, receiver = (
        TvmCache(
            layout,
            own,
            max_sequences=4,
            max_sequence_length=40,
            rope=RopeParameters("default", HEAD_DIM),
            writer=PeerWriter(index, pools),
        )
        for index, own in enumerate(pools)
    )
    sender.add_sequence(1)
    receiver.add_sequence(5)
    run(sender, [1], [begin + 5], draw_inputs(layout, begin + 5, seed=0))
    if begin:
        receiver.prepare_receive(5, begin)
        receiver.finish_receive(5)
    position_map = receiver.prepare_receive(5, 11)
    sender.mark_send(1, begin, position_map, 1)
    run(sender, [1], [6], draw_inputs(layout, 6, seed=1))
    receiver.finish_receive(5)
    end = begin + 11
    assert digest_kv(sender, 1, begin, end) == digest_kv(receiver, 5, begin, end)
    for own, other in zip(sender.gather_kv(1, begin, end), receiver.gather_kv(5, begin, end), strict=True):
        assert torch.equal(own[0], other[0])
        assert torch.equal(own[1], other[1])
    assert sender.bytes_sent(1) == 11 * layout.token_bytes == 11 * LAYOUT.token_bytes // 4


def test_numbers_become_the_nearest_entry_and_saturate() -> None:
    layout = fp8_layout(KVScales.uniform(2, 0.5, 4.0))
    entries = Fp8Entries.of_group(layout, 0, torch.device("cpu"))
    assert entries is not None
    values = e4m3_values().float()
    between = (values[1:] + values[:-1]) / 2
    given = torch.cat((values, between, torch.tensor([449.0, 480.0, 1e9, math.inf])))
    k = torch.stack((given, -given), -1)[:, None].repeat(1, 2, 1) * 0.5  # by position, head and sign
    quantised, _ = entries.quantise(0, k, k)
    assert quantised.dtype == FP8
    assert torch.equal(quantised.double() * 0.5, round_by(k.double(), (0.5,)))
    assert quantised.float()[-1].tolist() == [[448.0, -448.0]] * 2
    assert entries.quantise(0, k * math.nan, k)[0].isnan().all()


def test_layouts_with_other_scales_are_not_alike() -> None:
    layouts = [
        LAYOUT,
        *(fp8_layout(scales) for scales in SCALES.values()),
        fp8_layout(SCALES["per head"], torch.bfloat16),
    ]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert {layout.stored_dtype for layout in layouts[1:]} == {FP8}


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (KVScales.uniform(3), "scales.k is for 3 layers; the layout has 2"),
        (KVScales(((1.0, 1.0, 1.0), (1.0,)), ((1.0,),) * 2), "scales.k has 3 numbers for layer 0; it must have 1 or 2"),
        *(
            (KVScales.uniform(2, v=value), rf"scales\.v of layer 0 is {re.escape(str(value))}; ")
            for value in NO_FACTORS
        ),
        (KVScales(((1.0,), (1.0, 0.0)), ((1.0,),) * 2), r"scales\.k of layer 1 is 0\.0; it must be a number from"),
    ],
)
def test_scales_that_do_not_fit(scales: KVScales, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        fp8_layout(scales)


def test_pools_of_another_type_are_refused() -> None:
    layout = fp8_layout(SCALES["per layer"])
    with pytest.raises(InvalidArgument, match=r"of torch\.float8_e4m3fn, contiguous"):
        layout.check_pools(pools_of(LAYOUT, 4))
