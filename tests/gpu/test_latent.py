"""Latent attention in 16 bits on a GPU: absorbed, expanded, pushed, and in a CUDA graph; float32 is torch's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.attention.forward import Batch
from tandem.cache.attention.graph_buffers import GraphBuffers
from tandem.cache.kernels.base import Limits
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import assert_same_kv
from tests.cache.peer_writer import PeerWriter, UnmappedWriter
from tests.gpu.test_token_trees import PROGRAM as TREES
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
RANK, ROTATED, LAYERS, MAX_LENGTH = 512, 64, 2, 2048
HEADS = LatentHeads(128, 128)
# Prompts that are expanded, decodes, chunks of either way, and all of them at once.
PROGRAM = [
    {0: 300, 1: 7, 2: 1, 3: 64},
    {0: 1, 1: 1, 2: 1, 3: 1},
    {2: 40, 0: 1, 3: 530, 1: 1, 4: 17},
    {4: 1, 1: 1, 0: 1},
    {1: 9, 2: 33, 0: 700},
    {0: 20, 3: 20},
]

Inputs = list[tuple[Tensor, Tensor, Tensor]]
"""For each layer q, latents and keys."""


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    num_heads: int
    page_size: int
    fp8: bool = False

    @property
    def layout(self) -> KVLayout:
        group = LayerGroup(tuple(range(LAYERS)), Latent(RANK + ROTATED, RANK))
        return KVLayout((group,), self.page_size, self.dtype, KVScales.uniform(LAYERS) if self.fp8 else None)

    def pool(self, num_pages: int = 300) -> Tensor:
        """Full of NaN: what was never written must not matter."""
        dtype = self.layout.stored_dtype_of(0)
        return torch.full((num_pages, *self.layout.page_shape(0)), torch.nan, dtype=dtype, device="cuda")

    def cache(self, pool: Tensor, writer: PageWriter | None = None) -> TvmCache:
        return TvmCache(
            self.layout,
            (pool,),
            max_sequences=16,
            max_sequence_length=MAX_LENGTH,
            rope=RopeParameters("default", ROTATED),
            writer=writer,
            latent=HEADS,
        )

    def draw(self, num_tokens: int, seed: int) -> Inputs:
        generator = torch.Generator("cuda").manual_seed(seed)

        def rows(*shape: int) -> Tensor:
            return torch.randn(num_tokens, *shape, generator=generator, device="cuda").to(self.dtype)

        return [
            (rows(self.num_heads, HEADS.key_dim + ROTATED), rows(RANK), rows(RANK + ROTATED)[:, RANK:])
            for _ in range(LAYERS)
        ]

    def up(self) -> UpProjections:
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (self.num_heads, HEADS.key_dim + HEADS.value_dim, RANK)
        weight = torch.randn(shape, generator=generator, device="cuda") * RANK**-0.5
        return UpProjections(weight.to(torch.bfloat16).to(self.dtype), HEADS)


BF16 = Shape(torch.bfloat16, num_heads=16, page_size=16)
SHAPES = {
    "bf16": BF16,
    "bf16-128-heads": Shape(torch.bfloat16, num_heads=128, page_size=64),
    "fp16": Shape(torch.float16, num_heads=6, page_size=32),
}
FP8 = Shape(torch.bfloat16, num_heads=16, page_size=16, fp8=True)
IN_8_BITS = {
    "bf16 in 8 bits": FP8,
    "bf16-128-heads in 8 bits": Shape(torch.bfloat16, num_heads=128, page_size=64, fp8=True),
    "fp16 in 8 bits": Shape(torch.float16, num_heads=6, page_size=32, fp8=True),
}
ALL = SHAPES | IN_8_BITS


def exact(shape: Shape) -> Shape:
    return Shape(torch.float32, shape.num_heads, shape.page_size, shape.fp8)


def attend(cache: TvmCache, plan: Forward, layer: int, inputs: Inputs, up: UpProjections) -> Tensor:
    q, latents, keys = (tensor.clone() for tensor in inputs[layer])  # the call may overwrite them
    return cache.latent_attention(plan, layer, q, latents, keys, up)


@torch.inference_mode()
def run(cache: TvmCache, shape: Shape, appends: Mapping[int, int | list[int]], inputs: Inputs) -> list[Tensor]:
    """One forward; o of each layer. appends: numbers of plain tokens, or parents of nodes."""
    up = shape.up()
    lengths = [of if isinstance(of, int) else len(of) for of in appends.values()]
    parents = [None if isinstance(of, int) else of for of in appends.values()]
    plan = cache.begin_forward(list(appends), lengths, token_tree_parents=parents)
    outputs = [attend(cache, plan, layer, inputs, up) for layer in range(LAYERS)]
    cache.end_forward(plan)
    return outputs


def check(
    shape: Shape, program: Sequence[Mapping[int, int | list[int]]], commits: Mapping[int, dict[int, int]] | None = None
) -> None:
    """Against torch's kernels in float32, which tests/cache compares with a naive cache. commits: leaves of trees, by
    the step before which they are."""
    cache, twin = shape.cache(shape.pool()), exact(shape).cache(exact(shape).pool())
    for sequence in range(5):
        cache.add_sequence(sequence)
        twin.add_sequence(sequence)
    for step, appends in enumerate(program):
        leaves = (commits or {}).get(step, {})
        for of in (cache, twin):
            of.commit_token_tree(list(leaves), list(leaves.values()))
        inputs = shape.draw(sum(of if isinstance(of, int) else len(of) for of in appends.values()), seed=step)
        same = [(q.float(), latents.float(), keys.float()) for q, latents, keys in inputs]
        expected = run(twin, exact(shape), appends, same)
        for actual, wanted in zip(run(cache, shape, appends, inputs), expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("shape", ALL.values(), ids=ALL.keys())
def test_all_absorbed(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("latent", "latent_fp8"):
        monkeypatch.setattr(
            f"tandem.cache.kernels.flashinfer.{module}.absorbed_is_cheaper",
            lambda appends, *_: np.ones(appends.shape, np.bool_),
        )
    check(shape, PROGRAM)


@pytest.mark.parametrize("shape", ALL.values(), ids=ALL.keys())
def test_attention(shape: Shape) -> None:
    check(shape, PROGRAM)


@pytest.mark.parametrize("shape", [BF16, FP8], ids=["bf16", "bf16 in 8 bits"])
def test_a_stream_beside_a_plain_sequence(shape: Shape) -> None:
    """One that slides from the start, and one whose first positions are stored rotated."""
    cache, twin = shape.cache(shape.pool()), exact(shape).cache(exact(shape).pool())
    for step, appends in enumerate([{0: 100, 1: 80, 2: 7}, {0: 1, 1: 1, 2: 1}, {0: 30, 1: 9}, {2: 2, 0: 1}, {1: 1}]):
        for of in (cache, twin):
            for sequence in range(3) if not step else ():
                of.add_sequence(sequence)
            if step < 2:
                of.enable_sliding_window(step, 64, 5)
        inputs = shape.draw(sum(appends.values()), seed=step)
        same = [(q.float(), latents.float(), keys.float()) for q, latents, keys in inputs]
        expected = run(twin, exact(shape), appends, same)
        for actual, wanted in zip(run(cache, shape, appends, inputs), expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_trees(shape: Shape) -> None:
    """Trees that grow beside plain sequences, one after nothing; then commits, and a plain forward."""
    check(shape, [*TREES, dict.fromkeys(range(5), 1)], {len(TREES): {4: 64, 0: -1, 2: 255}})


def test_trees_in_8_bits_are_refused() -> None:
    cache = FP8.cache(FP8.pool())
    cache.add_sequence(0)
    with pytest.raises(InvalidArgument, match="token_tree_parents is given; Fp8LatentKernels"):
        cache.begin_forward([0], [2], token_tree_parents=[[-1, -1]])


@pytest.mark.parametrize("shape", [BF16, FP8], ids=["bf16", "bf16 in 8 bits"])
def test_heads_expanded_some_at_a_time(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cache.plan.latent.EXPANDED_ROWS", 4 * 1000)
    check(shape, [{0: 900}, {0: 500, 1: 300, 2: 1}])


def test_plans_may_be_made_ahead() -> None:
    cache, up = BF16.cache(BF16.pool()), BF16.up()
    batches = [({0: 20, 1: 5}, BF16.draw(25, seed=0)), ({2: 333}, BF16.draw(333, seed=1))]
    for sequence in range(3):
        cache.add_sequence(sequence)
    plans = [cache.begin_forward(list(appends), list(appends.values())) for appends, _ in batches]
    twins = []
    for appends, inputs in batches:
        twin = BF16.cache(BF16.pool())
        for sequence in appends:
            twin.add_sequence(sequence)
        twins.append(run(twin, BF16, appends, inputs))
    with torch.inference_mode():
        for layer in range(LAYERS):
            for plan, (_, inputs), expected in zip(plans, batches, twins, strict=True):
                assert_close(attend(cache, plan, layer, inputs, up), expected[layer])


@pytest.mark.parametrize("shape", [BF16, FP8], ids=["bf16", "bf16 in 8 bits"])
@pytest.mark.parametrize("writer_class", [PeerWriter, UnmappedWriter], ids=["from the append kernel", "by the writer"])
def test_what_is_pushed_arrives_bit_for_bit(writer_class: type[PeerWriter], shape: Shape) -> None:
    pools = [shape.pool(80) for _ in range(3)]
    writer = writer_class(0, [(pool,) for pool in pools])
    sender, *receivers = (shape.cache(pool, writer) for pool in pools)
    for sequence in (0, 1, 2):
        sender.add_sequence(sequence)
    run(sender, shape, {0: 21}, shape.draw(21, seed=1))
    for sequence, receiver in enumerate(receivers):
        receiver.add_sequence(9)
        sender.mark_send(sequence, 0, receiver.prepare_receive(9, 60), sequence + 1)
    run(sender, shape, {1: 30, 2: 8, 0: 20}, shape.draw(58, seed=2))
    run(sender, shape, {0: 19, 1: 30}, shape.draw(49, seed=3))
    for sequence, receiver in enumerate(receivers):
        assert sender.sends_done(sequence)
        receiver.finish_receive(9)
        assert_same_kv(sender, receiver, sequence, 9, 0, 60)
    assert len(writer.slot_writes) == 1
    assert bool(writer.token_writes) == (writer_class is UnmappedWriter)


@pytest.mark.parametrize("shape", [BF16, FP8], ids=["bf16", "bf16 in 8 bits"])
def test_a_graph_gives_what_the_eager_step_gives(shape: Shape) -> None:
    """One capture, replayed with batches of other sizes and lengths that cross page borders."""
    cache, twin, up = shape.cache(shape.pool()), shape.cache(shape.pool()), shape.up()
    prompts = {0: 31, 1: 500, 2: 1, 3: 64, 4: 1200}
    for of in (cache, twin):
        for sequence in prompts:
            of.add_sequence(sequence)
        run(of, shape, prompts, shape.draw(sum(prompts.values()), seed=0))
    (batch,) = cache.graph_buffers([Limits.of_step(8, shape.num_heads, 1)])
    static = shape.draw(8, seed=0)
    batch.clear()
    replay = capture(batch, static, up)
    for step in range(40):
        sequences = np.array([s for s in prompts if (s + step) % 3 or step % 2])
        inputs = shape.draw(len(sequences), seed=step)
        for places, given in zip(static, inputs, strict=True):
            for place, tensor in zip(places, given, strict=True):
                place[: len(sequences)] = tensor
        cache.begin(Batch(sequences), batch, [np.zeros(len(sequences), np.int64)])
        outputs = replay()
        expected = run(twin, shape, dict.fromkeys(sequences.tolist(), 1), inputs)
        for actual, wanted in zip(outputs, expected, strict=True):
            assert_close(actual[: len(sequences)], wanted)
    for sequence in prompts:
        assert_same_kv(cache, twin, sequence, sequence, 0, twin.num_tokens(sequence))


@torch.inference_mode()
def capture(batch: GraphBuffers, static: Inputs, up: UpProjections) -> Callable[[], list[Tensor]]:
    def compute() -> list[Tensor]:
        attention = batch.attention()
        copies = [(q.clone(), latents.clone(), keys.clone()) for q, latents, keys in static]  # they may be overwritten
        return [attention.attend_latents(layer, *inputs, up) for layer, inputs in enumerate(copies)]

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = compute()

    def replay() -> list[Tensor]:
        graph.replay()
        return outputs

    return replay
