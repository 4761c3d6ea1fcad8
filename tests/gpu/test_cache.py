"""The paged cache on a GPU: attention, pushes from the append kernel, page copies; FlashInfer and torch kernels."""

from dataclasses import replace

import pytest
import torch

from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.torch.kernels import TorchKernels
from tandem.cache.kernels.torch.merging import merge
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import assert_same_kv
from tests.cache.peer_writer import PeerWriter, UnmappedWriter
from tests.gpu.programs import Reference, Shape, run
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),  # FlashInfer compiles each attention kernel once, which takes up to a minute
]
BF16 = torch.bfloat16
PER_LAYER = KVScales(((0.02,), (0.013,)), ((0.017,), (0.031,)))
PER_HEAD = KVScales(((0.02, 0.005), (0.5, 0.013)), ((0.017, 0.4), (0.031, 0.01)))
SHAPES = {
    "bf16-128": Shape(BF16, q_heads=32, kv_heads=8, head_dim=128, page_size=16),
    "fp16-128": Shape(torch.float16, q_heads=8, kv_heads=8, head_dim=128, page_size=32),
    "bf16-64-mqa": Shape(BF16, q_heads=8, kv_heads=1, head_dim=64, page_size=8),
    "bf16-64-group-7": Shape(BF16, q_heads=14, kv_heads=2, head_dim=64, page_size=64),
    "bf16-256": Shape(BF16, q_heads=4, kv_heads=2, head_dim=256, page_size=16),
    "bf16-512": Shape(BF16, q_heads=8, kv_heads=1, head_dim=512, page_size=16),
    "bf16-512-window": Shape(BF16, q_heads=4, kv_heads=2, head_dim=512, page_size=16, window=50, softcap=3.0),
    "fp8-512": Shape(BF16, q_heads=8, kv_heads=2, head_dim=512, page_size=16, scales=PER_HEAD),
    "bf16-128-window": Shape(BF16, q_heads=32, kv_heads=8, head_dim=128, page_size=16, window=50),
    "bf16-64-window-1": Shape(BF16, q_heads=8, kv_heads=2, head_dim=64, page_size=8, window=1),
    "bf16-256-softcap": Shape(BF16, q_heads=4, kv_heads=2, head_dim=256, page_size=16, window=33, softcap=3.0),
    "fp8-128": Shape(BF16, q_heads=32, kv_heads=8, head_dim=128, page_size=16, scales=PER_LAYER),
    "fp8-64-heads": Shape(BF16, q_heads=14, kv_heads=2, head_dim=64, page_size=64, scales=PER_HEAD),
    "fp8-fp16-128": Shape(torch.float16, q_heads=8, kv_heads=2, head_dim=128, page_size=16, scales=PER_LAYER),
    "fp8-256-softcap": Shape(BF16, 4, 2, head_dim=256, page_size=16, window=33, softcap=3.0, scales=PER_HEAD),
    "fp8-fp32": Shape(torch.float32, q_heads=4, kv_heads=2, head_dim=24, page_size=16, scales=PER_HEAD),
    "fp32": Shape(torch.float32, q_heads=4, kv_heads=2, head_dim=24, page_size=16),
}
# What each sequence appends in each forward: prompts, decodes, chunks and all of them at once.
PROGRAM = [
    {0: 300, 1: 7, 2: 1, 3: 64},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {2: 40, 0: 1, 3: 130, 1: 1, 4: 17},
    {4: 1, 1: 1, 0: 1},
    {1: 9, 2: 33},
]
QWEN3 = SHAPES["bf16-128"]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_attention(shape: Shape) -> None:
    cache, reference = shape.cache(shape.pool()), Reference(shape)
    known: set[int] = set()
    for step, appends in enumerate(PROGRAM):
        for sequence in appends.keys() - known:
            cache.add_sequence(sequence)
            known.add(sequence)
        inputs = shape.draw(sum(appends.values()), seed=step)
        for actual, expected in zip(run(cache, appends, inputs), reference.run(appends, inputs), strict=True):
            assert actual.is_contiguous()
            # K of 16 bits and of 64 is at times rounded to neighbouring entries, which shows in float16.
            assert_close(actual if shape.scales is None else actual.bfloat16(), expected)


@pytest.mark.parametrize("name", ["bf16-128", "bf16-64-mqa", "fp8-128"])
def test_long_prompts(name: str) -> None:
    """So many tokens make the kernels gather K and V first: fresh, after others, and beside single tokens."""
    shape = SHAPES[name]
    cache, reference = shape.cache(shape.pool(400)), Reference(shape)
    for sequence in range(4):
        cache.add_sequence(sequence)
    for step, appends in enumerate(({0: 700, 1: 601}, {0: 300, 3: 1, 1: 393, 2: 500}, {2: 1, 0: 1})):
        inputs = shape.draw(sum(appends.values()), seed=step)
        for actual, expected in zip(run(cache, appends, inputs), reference.run(appends, inputs), strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize("shape", ["bf16-128-window", "bf16-64-group-7", "bf16-256-softcap", "fp8-128"])
def test_learned_sinks(shape: str) -> None:
    of = SHAPES[shape]
    sinks = torch.linspace(-2, 4, of.q_heads, device="cuda", dtype=BF16)
    cache, reference = of.cache(of.pool()), Reference(of, sinks)
    for sequence in range(5):
        cache.add_sequence(sequence)
    for step, appends in enumerate(PROGRAM):
        inputs = of.draw(sum(appends.values()), seed=step)
        for actual, expected in zip(run(cache, appends, inputs, sinks), reference.run(appends, inputs), strict=True):
            assert_close(actual, expected)


@pytest.mark.parametrize("window", [None, 20, 90])
def test_a_stream_beside_a_plain_sequence(window: int | None) -> None:
    """A sliding window with sinks on the GPU as float32 on a CPU has it. window: of the layers."""
    shape = replace(QWEN3, window=window)
    cache = shape.cache(shape.pool())
    exact = replace(shape, dtype=torch.float32)
    twin = exact.cache(exact.pool())
    for of in (cache, twin):
        of.add_sequence(0)
        of.add_sequence(1)
        of.enable_sliding_window(0, 64, 5)
    for step, appends in enumerate([{0: 100, 1: 7}, {0: 1, 1: 1}, {0: 30}, {1: 2, 0: 1}, {0: 1}]):
        inputs = QWEN3.draw(sum(appends.values()), seed=step)
        same = [(q.float(), k.float(), v.float()) for q, k, v in inputs]
        for actual, expected in zip(run(cache, appends, inputs), run(twin, appends, same), strict=True):
            assert_close(actual, expected)


def test_plans_may_be_made_ahead() -> None:
    """FlashInfer's wrappers keep one plan; the cache keeps as many as were begun."""
    cache = QWEN3.cache(QWEN3.pool())
    batches = [({0: 20, 1: 5}, QWEN3.draw(25, seed=0)), ({2: 33}, QWEN3.draw(33, seed=1))]
    for sequence in range(3):
        cache.add_sequence(sequence)
    plans = [cache.begin_forward(list(appends), list(appends.values())) for appends, _ in batches]
    for layer in range(2):
        for plan, (appends, inputs) in zip(plans, batches, strict=True):
            with torch.inference_mode():
                actual = cache.attention(plan, layer, *inputs[layer])
            expected = Reference(QWEN3).run(appends, inputs)[layer]
            assert_close(actual, expected)


@pytest.mark.parametrize("shape", ["bf16-128", "fp8-128"])
@pytest.mark.parametrize("writer_class", [PeerWriter, UnmappedWriter], ids=["from the append kernel", "by the writer"])
def test_what_is_pushed_arrives_bit_for_bit(writer_class: type[PeerWriter], shape: str) -> None:
    """Two receivers, chunks, cached positions page to page, and a sequence that stays."""
    of = SHAPES[shape]
    pools = [of.pool(80) for _ in range(3)]
    writer = writer_class(0, [(pool,) for pool in pools])
    sender, *receivers = (of.cache(pool, writer) for pool in pools)
    for sequence in (0, 1, 2):
        sender.add_sequence(sequence)
    run(sender, {0: 21}, QWEN3.draw(21, seed=1))
    for sequence, receiver in enumerate(receivers):
        receiver.add_sequence(9)
        sender.mark_send(sequence, 0, receiver.prepare_receive(9, 60), sequence + 1)
    run(sender, {1: 30, 2: 8, 0: 20}, QWEN3.draw(58, seed=2))
    run(sender, {0: 19, 1: 30}, QWEN3.draw(49, seed=3))
    for sequence, receiver in enumerate(receivers):
        assert sender.sends_done(sequence)
        receiver.finish_receive(9)
        assert_same_kv(sender, receiver, sequence, 9, 0, 60)
    assert len(writer.slot_writes) == 1
    assert bool(writer.token_writes) == (writer_class is UnmappedWriter)


@pytest.mark.parametrize("shape", ["bf16-128", "fp8-128"])
def test_forks_share_and_copy(shape: str) -> None:
    cache, reference = SHAPES[shape].cache(SHAPES[shape].pool()), Reference(SHAPES[shape])
    cache.add_sequence(0)
    inputs = QWEN3.draw(40, seed=0)
    run(cache, {0: 40}, inputs)
    reference.run({0: 40}, inputs)
    cache.fork_sequence(0, 1)
    run(cache, {1: 3}, QWEN3.draw(3, seed=1))
    inputs = QWEN3.draw(2, seed=2)
    for actual, expected in zip(run(cache, {0: 2}, inputs), reference.run({0: 2}, inputs), strict=True):
        assert_close(actual, expected)
    assert_same_kv(cache, cache, 0, 1, 0, 40)


@pytest.mark.parametrize("name", ["fp32", "fp8-fp32"])
def test_float32_is_served_by_torch(name: str) -> None:
    shape = SHAPES[name]
    cache = shape.cache(shape.pool())
    assert all(isinstance(group.backend, TorchKernels) for group in cache._groups)


@pytest.mark.parametrize("scales", [None, KVScales.uniform(3, 0.02, 0.03)], ids=["bf16", "fp8"])
def test_reading_what_a_layer_has_stored(scales: KVScales | None) -> None:
    """Whole and in parts, causally or not, as torch's kernels do on the same pages."""
    layout = KVLayout((LayerGroup((0, 1), KV(2, 64)),), 16, BF16, scales, readers=((2, 0),))
    options = {"max_sequences": 8, "max_sequence_length": 512, "rope": RopeParameters("default", 64), "writer": None}
    pools = [torch.zeros((128, *layout.page_shape(0)), dtype=layout.stored_dtype, device="cuda") for _ in range(2)]
    caches = [
        TvmCache(layout, [pool], kernels=kernels, **options)
        for pool, kernels in zip(pools, (choose_kernels, TorchKernels), strict=True)
    ]
    known: set[int] = set()
    for step, appends in enumerate(PROGRAM):
        for sequence in appends.keys() - known:
            for cache in caches:
                cache.add_sequence(sequence)
            known.add(sequence)
        generator = torch.Generator("cuda").manual_seed(step)
        q, k, v = (
            torch.randn((sum(appends.values()), heads, 64), generator=generator, device="cuda").to(BF16)
            for heads in (8, 2, 2)
        )
        found = [read_everything(cache, appends, q, k, v) for cache in caches]
        for actual, expected in zip(*found, strict=True):
            assert_close(actual.to(BF16), expected.double())


@torch.inference_mode()
def read_everything(
    cache: TvmCache, appends: dict[int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the outputs of the reader of layer 0 in one forward, whole and in parts, and the merged parts of both
    layers."""
    plan = cache.begin_forward(list(appends), list(appends.values()))
    for layer in range(2):
        cache.attention(plan, layer, q, k + layer, v - layer)
    outputs = [cache.read(plan, 2, q)]
    for causal in (True, False):
        parts = [cache.read_part(plan, layer, q, causal=causal) for layer in (2, 1)]
        outputs += [*parts[0], *merge(parts)]
    outputs.append(cache.read(plan, 2, q))  # the forward's own plan is made anew
    cache.end_forward(plan)
    return outputs
