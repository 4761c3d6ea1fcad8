"""Sliding windows with attention sinks, against a StreamingLLM that keeps its tokens in a list."""

import re
from random import Random

import pytest
import torch

from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kinds.index import IndexKeys
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.errors import InvalidArgument, OutOfPages
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import ALL, Chunk, Sliding, Span, Window
from tests.cache.naive import (
    HEAD_DIM,
    MAX_LENGTH,
    ROPE,
    Inputs,
    NaiveCache,
    assert_same_kv,
    cache_of,
    draw_inputs,
    layout_of,
    pools_of,
    ropes_of,
    run,
    spanned,
)
from tests.cache.naive_streams import NaiveStream, check_contents
from tests.cache.peer_writer import PeerWriter
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

LAYOUT = layout_of(2, 1)
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])


@pytest.mark.gate("*-choose_kernels", "9-0-True-30-TorchKernels", "8-3-False-2-TorchKernels")
@pytest.mark.parametrize("kernels", [TorchKernels, choose_kernels])
@pytest.mark.parametrize(
    ("window", "sink", "after", "held"),
    [(12, 4, False, 0), (9, 0, True, 30), (8, 3, False, 2), (8, 3, True, 0), (21, 7, False, 40), (2, 1, False, 9)],
)
def test_appends_pops_and_neighbours(window: int, sink: int, after: bool, held: int, kernels: KernelFactory) -> None:
    """A sequence that keeps all runs in the same forwards. Some chunks are longer than the window. `held` positions are
    there before."""
    random = Random(window)
    cache, plain = cache_of(LAYOUT, 48, kernels=kernels), NaiveCache(LAYOUT, sinks=SINKS)
    stream = NaiveStream.of(LAYOUT, MAX_LENGTH, sink)
    for sequence in (0, 1):
        cache.add_sequence(sequence)
    plain.add(1)
    if held:
        inputs = draw_inputs(LAYOUT, held, seed=99)
        run(cache, [0], [held], inputs, SINKS)
        stream.run(held, inputs, SINKS)
    cache.enable_sliding_window(0, window, sink, evict_after=after)
    stream.window, stream.evict_after, stream.rotated = window, after, held
    for step in range(30):
        count = random.choice([1, 1, 1, 2, 5, 17])
        inputs = draw_inputs(LAYOUT, count + 1, seed=step)
        expected = stream.run(count, inputs.between(0, count), SINKS)
        beside = plain.run([1], [1], inputs.between(count, count + 1))
        for actual, own, other in zip(run(cache, [0, 1], [count, 1], inputs, SINKS), expected, beside, strict=True):
            assert_close(actual[:count], own)
            assert_close(actual[count:], other)
        check_contents(cache, 0, stream)
        if random.random() < 0.3:
            most = len(stream.kept) - (sink if stream.length > len(stream.kept) else 0)
            if most < cache.num_tokens(0):
                with pytest.raises(InvalidArgument, match=f"only the last {most} positions are there|counts has"):
                    cache.pop(0, most + 1)
            popped = random.randint(0, min(most, 6))
            cache.pop(0, popped)
            stream.pop(popped)
            stream.rotated = min(stream.rotated, stream.length)
            check_contents(cache, 0, stream)
    cache.clear()
    assert cache.num_free_pages == 48


@pytest.mark.timeout(600)
@pytest.mark.gate("50000")
@pytest.mark.parametrize("tokens", [50_000, 1_000_000])
def test_a_million_tokens_go_through_few_pages(tokens: int) -> None:
    """Appends 250 tokens at a time. Decodes and short chunks between them are compared with the naive stream."""
    layout = KVLayout((LayerGroup((0,), KV(1, HEAD_DIM)),), 4, torch.float32)
    pools = pools_of(layout, 66)
    cache = TvmCache(layout, pools, max_sequences=1, max_sequence_length=300, rope=ROPE, writer=None)
    stream = NaiveStream.of(layout, 32, 3)
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 32, 3)
    cache.reserve(0, 10_000_000, 250)
    free = cache.num_free_pages
    assert free <= 1
    while stream.length < tokens:
        for count in [250] * 199 + [1, 5, 1]:
            ((q, k, v),) = draw_inputs(layout, count, seed=stream.length).layers
            inputs = Inputs([(q[:, :1], k, v)])
            outputs = run(cache, [0], [count], inputs)
            if count == 250:
                pass_on(stream, count, inputs)
                continue
            for actual, expected in zip(outputs, stream.run(count, inputs), strict=True):
                assert_close(actual, expected)
        assert cache.num_free_pages == free
        check_contents(cache, 0, stream)


def pass_on(stream: NaiveStream, count: int, inputs: Inputs) -> None:
    """A forward whose outputs nobody looks at."""
    stream.evict(count)
    stream.kept += range(stream.length, stream.length + count)
    stream.length += count
    stream.keys = [torch.cat((old, k)) for old, (_, k, _) in zip(stream.keys, inputs.layers, strict=True)]
    stream.values = [torch.cat((old, v)) for old, (_, _, v) in zip(stream.values, inputs.layers, strict=True)]


@pytest.mark.parametrize(("window", "sink", "held"), [(12, 3, 0), (24, 5, 40)])
@pytest.mark.parametrize("span", [Window(6), Window(15), Window(40), Chunk(8), Chunk(16)], ids=str)
def test_spans_of_layers_go_by_the_text(span: Span, window: int, sink: int, held: int) -> None:
    """Layers with a window or chunks see of what is kept what they would see of the whole text, and hold no more pages
    for it than a plain sequence does."""
    layout, random = spanned(LAYOUT, ALL, span), Random(window)
    cache, stream = cache_of(layout, 48), NaiveStream.of(layout, MAX_LENGTH, sink)
    cache.add_sequence(0)
    for begin in range(0, held, 9):
        count = min(9, held - begin)
        inputs = draw_inputs(layout, count, seed=begin)
        run(cache, [0], [count], inputs, SINKS)
        stream.run(count, inputs, SINKS)
    cache.enable_sliding_window(0, window, sink)
    stream.window, stream.rotated = window, held
    for step in range(60):
        count = random.choice([1, 1, 1, 1, 2, 5, 17])
        inputs = draw_inputs(layout, count, seed=100 + step)
        outputs = run(cache, [0], [count], inputs, SINKS)
        for actual, expected in zip(outputs, stream.run(count, inputs, SINKS), strict=True):
            assert_close(actual, expected)
        group = cache._table.groups[1]
        assert group.ends[0] - group.begins[0] <= span.most_pages(MAX_LENGTH, count, 4)
    cache.clear()
    assert cache.num_free_pages == 48


def test_out_of_pages_evicts_nothing() -> None:
    cache, stream = cache_of(LAYOUT, 6), NaiveStream.of(LAYOUT, 12, 4)
    for sequence in (0, 1):
        cache.add_sequence(sequence)
    cache.enable_sliding_window(0, 12, 4)
    for step, count in enumerate((12, 3, 1)):
        inputs = draw_inputs(LAYOUT, count, seed=step)
        run(cache, [0], [count], inputs)
        stream.run(count, inputs)
    free = cache.num_free_pages
    with pytest.raises(OutOfPages):
        cache.begin_forward([1, 0], [4 * free + 8, 5])
    assert cache.num_free_pages == free
    check_contents(cache, 0, stream)
    inputs = draw_inputs(LAYOUT, 1, seed=9)
    for actual, expected in zip(run(cache, [0], [1], inputs), stream.run(1, inputs), strict=True):
        assert_close(actual, expected)


def test_forks_share_the_sink_and_slide_too() -> None:
    cache = cache_of(LAYOUT, 32)
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 14, 6)
    streams = {0: NaiveStream.of(LAYOUT, 14, 6)}
    for step, count in enumerate((9, 8, 1)):
        inputs = draw_inputs(LAYOUT, count, seed=step)
        run(cache, [0], [count], inputs)
        streams[0].run(count, inputs)
    with pytest.raises(InvalidArgument, match=r"position is 7; it must be -1 .* or from 0 to 6"):
        cache.fork_sequence(0, 1, 7)
    with pytest.raises(InvalidArgument, match="position is -1"):
        cache.fork_sequence(0, 1)
    used = 32 - cache.num_free_pages
    for child, position in ((1, 6), (2, 4), (3, 0)):
        cache.fork_sequence(0, child, position)
        streams[child] = NaiveStream.of(LAYOUT, 14, 6)
        streams[child].kept, streams[child].length = list(range(position)), position
        streams[child].keys = [k[:position] for k in streams[0].keys]
        streams[child].values = [v[:position] for v in streams[0].values]
    assert 32 - cache.num_free_pages == used + 1  # the copy of one partial page
    for step in range(10):
        for sequence, stream in streams.items():
            count = 1 + (step + sequence) % 4
            inputs = draw_inputs(LAYOUT, count, seed=100 * step + sequence)
            for actual, expected in zip(
                run(cache, [sequence], [count], inputs), stream.run(count, inputs), strict=True
            ):
                assert_close(actual, expected)
            check_contents(cache, sequence, stream)
    cache.clear()
    assert cache.num_free_pages == 32


def test_a_prefix_that_others_share_is_the_sink_of_a_fork() -> None:
    """It stays as the parent stores it, and costs no page."""
    cache, system = cache_of(LAYOUT, 32), NaiveStream.of(LAYOUT, MAX_LENGTH, 0)
    cache.add_sequence(0)
    inputs = draw_inputs(LAYOUT, 8, seed=0)
    run(cache, [0], [8], inputs)
    system.run(8, inputs)
    streams = {child: system.fork(8, 13, sink, rotated=8) for child, sink in ((1, 8), (2, 6))}
    used = 32 - cache.num_free_pages
    for child, stream in streams.items():
        cache.fork_sequence(0, child)
        cache.enable_sliding_window(child, 13, stream.sink)
    assert 32 - cache.num_free_pages == used
    for step in range(12):
        inputs, counts = draw_inputs(LAYOUT, 4, seed=10 + step), (1, 3) if step % 2 else (1, 1)
        parts = inputs.between(0, 1), inputs.between(1, sum(counts))
        outputs = run(cache, [1, 2], list(counts), inputs.between(0, sum(counts)))
        expected = [
            stream.run(*part) for stream, part in zip(streams.values(), zip(counts, parts, strict=True), strict=True)
        ]
        for actual, first, second in zip(outputs, *expected, strict=True):
            assert_close(actual, torch.cat((first, second)))
        for child, stream in streams.items():
            check_contents(cache, child, stream)
    check_contents(cache, 0, NaiveStream(64, 0, system.keys, system.values, 8, list(range(8)), rotated=8))
    cache.clear()
    assert cache.num_free_pages == 32


def test_a_child_that_does_not_slide_grows_as_others_do() -> None:
    cache, stream = cache_of(LAYOUT, 32), NaiveStream.of(LAYOUT, 14, 6)
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 14, 6)
    for step, count in enumerate((9, 8, 1)):
        inputs = draw_inputs(LAYOUT, count, seed=step)
        run(cache, [0], [count], inputs)
        stream.run(count, inputs)
    cache.fork_sequence(0, 1, 6, slides=False)
    child = stream.fork(6, MAX_LENGTH, 0, rotated=0)
    for step in range(8):
        inputs = draw_inputs(LAYOUT, 1 + step, seed=20 + step)
        for actual, expected in zip(run(cache, [1], [1 + step], inputs), child.run(1 + step, inputs), strict=True):
            assert_close(actual, expected)
    check_contents(cache, 1, child)
    with pytest.raises(InvalidArgument, match=r"sequence 1 would have 73 positions; 0 … 64 fit"):
        cache.prepare_receive(1, 31)
    cache.enable_sliding_window(1, 20, 3)
    grandchild = child.fork(42, 20, 3, rotated=0)
    inputs = draw_inputs(LAYOUT, 2, seed=50)
    for actual, expected in zip(run(cache, [1], [2], inputs), grandchild.run(2, inputs), strict=True):
        assert_close(actual, expected)
    cache.fork_sequence(1, 2, 0, slides=False)
    assert cache.match_prefix(2, [1] * 9) == 0  # nothing of it is stored before RoPE: it is a plain one


@pytest.mark.parametrize("matched", [0, 8])
def test_a_plain_sequence_is_sent_to_one_that_slides(matched: int) -> None:
    """The sender sends only what the window will show. The receiver may have a prefix of it, which it shares."""
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    writer = PeerWriter(0, pools)
    sender, receiver = (cache_of(LAYOUT, pools=own, writer=writer) for own in pools)
    inputs, stream = draw_inputs(LAYOUT, 30, seed=3), NaiveStream.of(LAYOUT, MAX_LENGTH, 2)
    stream.run(30, inputs)
    if matched:
        receiver.add_sequence(9)
        run(receiver, [9], [8], inputs.between(0, 8))
        receiver.publish_prefix(9, list(range(8)))
    receiver.add_sequence(0)
    assert receiver.match_prefix(0, list(range(30))) == matched
    receiver.enable_sliding_window(0, 12, 2)
    sender.add_sequence(0)
    run(sender, [0], [11], inputs.between(0, 11))
    sender.mark_send(0, matched, receiver.prepare_receive(0, 30 - matched, rotated=True), 1)
    for begin in range(11, 30, 5):
        run(sender, [0], [min(5, 30 - begin)], inputs.between(begin, min(begin + 5, 30)))
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    stream.window, stream.rotated = 12, 30
    stream.evict(0)
    check_contents(receiver, 0, stream)
    written = sum(n for _, group, n in writer.slot_writes if group == 0)
    written += sum(n for _, group, layer, n in writer.token_writes if (group, layer) == (0, 0))
    assert written == (10 if matched else 12)
    for step in range(20):
        own = draw_inputs(LAYOUT, 1, seed=1000 + step)
        for actual, expected in zip(run(receiver, [0], [1], own), stream.run(1, own), strict=True):
            assert_close(actual, expected)
    check_contents(receiver, 0, stream)


@pytest.mark.parametrize("sink", [0, 3, 4, 6])
@pytest.mark.parametrize(("held", "total", "cached"), [(0, 40, 0), (0, 40, 33), (2, 9, 5), (15, 30, 8), (5, 16, 15)])
def test_a_stream_is_transferred(sink: int, held: int, total: int, cached: int) -> None:
    """The receiver holds `held` positions of the stream, the sender `cached`. The positions that the window shows at
    the end are sent."""
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    writer = PeerWriter(0, pools)
    sender, receiver = (
        TvmCache(LAYOUT, own, max_sequences=4, max_sequence_length=MAX_LENGTH, rope=ROPE, writer=writer)
        for own in pools
    )
    inputs, window = draw_inputs(LAYOUT, total, seed=sink), 12
    naive = NaiveStream.of(LAYOUT, window, sink)
    for cache, first in ((sender, cached), (receiver, held)):
        cache.add_sequence(0)
        cache.enable_sliding_window(0, window, sink)
        for begin in range(0, first, 5):
            end = min(begin + 5, first)
            run(cache, [0], [end - begin], inputs.between(begin, end))
    receiver.reserve(0, 1000, 1)
    free = receiver.num_free_pages
    position_map = receiver.prepare_receive(0, total - held)
    sender.mark_send(0, held, position_map, 1)
    for begin in range(cached, total, 4):
        end = min(begin + 4, total)
        run(sender, [0], [end - begin], inputs.between(begin, end))
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    assert receiver.num_free_pages == free
    kept = [*range(min(sink, total)), *range(max(sink, total - (window - sink)), total)]
    if held + (total - held) <= window:
        kept = list(range(total))
    naive.kept, naive.length = kept, total
    naive.keys = [k[kept] for _, k, _ in inputs.layers]
    naive.values = [v[kept] for _, _, v in inputs.layers]
    check_contents(receiver, 0, naive)
    wanted = sum(position >= held for position in kept)
    written = sum(n for _, group, n in writer.slot_writes if group == 0)
    written += sum(n for _, group, layer, n in writer.token_writes if (group, layer) == (0, 0))
    assert written == wanted
    for step in range(8):
        own = draw_inputs(LAYOUT, 1, seed=1000 + step)
        for actual, expected in zip(run(receiver, [0], [1], own), naive.run(1, own), strict=True):
            assert_close(actual, expected)
    receiver.remove_sequence(0)
    assert receiver.num_free_pages == 32


def test_wrong_use_is_refused() -> None:
    cache = cache_of(LAYOUT)
    cache.add_sequence(0)
    for window, sink, message in (
        (0, 0, "window is 0; it must be from 1 to 57"),
        (58, 0, "window is 58"),
        (8, 8, "sink is 8; it must be from 0 to 7"),
        (8, -1, "sink is -1"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            cache.enable_sliding_window(0, window, sink)
    run(cache, [0], [60], draw_inputs(LAYOUT, 60, seed=0))
    with pytest.raises(InvalidArgument, match=r"60 positions are rotated before .* window of 8 behind 2; at most 58"):
        cache.enable_sliding_window(0, 8, 2)
    cache.pop(0, 2)
    cache.enable_sliding_window(0, 8, 2)
    cache.add_sequence(2)
    cache.enable_sliding_window(2, 8, 2)
    run(cache, [2], [1], draw_inputs(LAYOUT, 1, seed=1))
    with pytest.raises(InvalidArgument, match="of sequence 2 only 0 of 1 positions are rotated"):
        cache.prepare_receive(2, 1, rotated=True)
    cache.add_sequence(1)
    cache.enable_sliding_window(1, 8, 2)
    for call in (lambda: cache.match_prefix(1, [1] * 9), lambda: cache.publish_prefix(1, [])):
        with pytest.raises(InvalidArgument, match="sequence 1 slides"):
            call()
    with pytest.raises(InvalidArgument, match="append_lengths has 65; each must be from 1 to 64"):
        cache.begin_forward([1], [65])
    run(cache, [1], [9], draw_inputs(LAYOUT, 9, seed=9))
    with pytest.raises(InvalidArgument, match=r"sequence 1 would have .* positions; 0 … 64 fit"):
        cache.begin_forward([1], [64])
    cache.remove_sequence(1)
    cache.add_sequence(1)
    assert cache.match_prefix(1, [1] * 9) == 0  # a new sequence of the same id does not slide
    indexed = KVLayout((LayerGroup((0,), Latent(12, 8)), LayerGroup((0,), IndexKeys(10, 6, 5))), 4, torch.float32)
    with_index = cache_of(indexed, rope=ropes_of(indexed))
    with_index.add_sequence(0)
    with pytest.raises(InvalidArgument, match="groups with index keys"):
        with_index.enable_sliding_window(0, 8, 2)
    dynamic = cache_of(LAYOUT, rope=RopeParameters("dynamic", HEAD_DIM, factor=2.0, max_position_embeddings=8))
    dynamic.add_sequence(0)
    with pytest.raises(InvalidArgument, match="RoPE is dynamic"):
        dynamic.enable_sliding_window(0, 8, 2)


def test_pages_that_a_stream_receives_into_drain_when_it_goes() -> None:
    """All of them: also those that slid to lower indices when room was made."""
    cache = cache_of(LAYOUT, 12)
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 8, 0)
    for step in range(3):
        run(cache, [0], [8], draw_inputs(LAYOUT, 8, seed=step))
    position_map = cache.prepare_receive(0, 4)
    pages = {int(slot) // 4 for slot in position_map.runs[0].slots()}
    cache.remove_sequence(0)
    assert cache.num_draining_pages == len(pages)
    cache.finish_receive(0)
    assert (cache.num_draining_pages, cache.num_free_pages) == (0, 12)


def test_a_stream_is_sent_to_one_that_slides_alike_only() -> None:
    """Before anything is evicted the maps look alike, but K is stored and tokens are computed in different ways."""
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    sender, receiver = (cache_of(LAYOUT, pools=own, writer=PeerWriter(pe, pools)) for pe, own in enumerate(pools))
    ways = [None, Sliding(16, 4), Sliding(16, 2), Sliding(15, 4), Sliding(16, 4, evict_after=True)]
    for of in (sender, receiver):
        for sequence, way in enumerate(ways):
            of.add_sequence(sequence)
            if way is not None:
                of.enable_sliding_window(sequence, way.window, way.sink, evict_after=way.evict_after)
    maps = [receiver.prepare_receive(sequence, 8) for sequence in range(len(ways))]
    for own, way in enumerate(ways):
        for other, theirs in enumerate(ways):
            if way != theirs:
                message = re.escape(f"is of a sequence with {theirs}; the sender's sequence has {way}:")
                with pytest.raises(InvalidArgument, match=message):
                    sender.mark_send(own, 0, maps[other], 1)
        sender.mark_send(own, 0, maps[own], 1)


def test_what_a_stream_lets_go_of_is_not_sent() -> None:
    """Neither what it has popped its way out of, nor what a forward beyond the end of the map would evict first."""
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    sender, receiver = (cache_of(LAYOUT, pools=own, writer=PeerWriter(pe, pools)) for pe, own in enumerate(pools))
    for of, sequence in ((sender, 0), (receiver, 0), (receiver, 1)):
        of.add_sequence(sequence)
        of.enable_sliding_window(sequence, 8, 2)
    for step in range(5):
        run(sender, [0], [4], draw_inputs(LAYOUT, 4, seed=step))
    sender.pop(0, 5)  # of positions 14 … 19 the first is left
    with pytest.raises(InvalidArgument, match="asks for position 10, which does not stay in the sliding window of 8"):
        sender.mark_send(0, 0, receiver.prepare_receive(0, 16), 1)
    run(sender, [0], [5], draw_inputs(LAYOUT, 5, seed=5))
    sender.mark_send(0, 0, receiver.prepare_receive(1, 21), 1)
    with pytest.raises(
        InvalidArgument, match=r"append_lengths\[0\] is 2; .*: it must be at most 1, up to the end of its position map"
    ):
        sender.begin_forward([0], [2])
    run(sender, [0], [1], draw_inputs(LAYOUT, 1, seed=6))
    receiver.finish_receive(1)
    assert sender.sends_done(0)
    for begin, end in ((0, 2), (15, 21)):
        assert_same_kv(sender, receiver, 0, 1, begin, end)
