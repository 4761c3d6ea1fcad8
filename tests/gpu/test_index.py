"""Index keys in 16 bits on a GPU: a step in graph buffers gives what an eager one gives, and what is pushed arrives."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.attention.forward import Attention, Batch
from tandem.cache.kernels.base import Index, Limits
from tandem.cache.kinds.index import IndexKeys
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import assert_same_kv
from tests.cache.peer_writer import PeerWriter, UnmappedWriter
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
RANK, ROTATED, WIDTH, TOP_K, HEADS, INDEX_HEADS, DTYPE = 512, 64, 128, 256, 16, 64, torch.bfloat16
LATENT_HEADS = LatentHeads(128, 128)
# The second layer attends to what the first has chosen.
LAYOUT = KVLayout(
    (
        LayerGroup((0, 1), Latent(RANK + ROTATED, RANK)),
        LayerGroup((0,), IndexKeys(WIDTH, WIDTH - ROTATED, TOP_K)),
    ),
    16,
    DTYPE,
)
LAYOUTS = {"bf16": LAYOUT, "bf16 in 8 bits": replace(LAYOUT, scales=KVScales.uniform(2))}
PROMPTS = {0: 31, 1: 250, 2: 1, 3: 700, 4: 1200}  # one crosses top_k

Inputs = list[tuple[Tensor, Tensor, Tensor, Index | None]]


def pools(layout: KVLayout) -> tuple[Tensor, ...]:
    """Full of NaN: what was never written must not matter."""
    return tuple(
        torch.full((300, *layout.page_shape(group)), torch.nan, dtype=layout.stored_dtype_of(group), device="cuda")
        for group in (0, 1)
    )


def cache_over(layout: KVLayout, its: Sequence[Tensor], writer: PageWriter | None = None) -> TvmCache:
    rope = RopeParameters("default", ROTATED)
    return TvmCache(
        layout, its, max_sequences=16, max_sequence_length=2048, rope=rope, writer=writer, latent=LATENT_HEADS
    )


def draw(num_tokens: int, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def rows(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, device="cuda").to(DTYPE)

    still, rotated = rows(WIDTH).split((WIDTH - ROTATED, ROTATED), 1)
    choice = Index(rows(INDEX_HEADS, WIDTH), still, rotated, rows(INDEX_HEADS).float())
    return [(rows(HEADS, 128 + ROTATED), rows(RANK), rows(RANK + ROTATED)[:, RANK:], of) for of in (choice, None)]


@functools.cache
def up() -> UpProjections:
    """Made once: a capture takes no new generator."""
    generator = torch.Generator("cuda").manual_seed(0)
    return UpProjections(
        (torch.randn(HEADS, 256, RANK, generator=generator, device="cuda") * RANK**-0.5).to(DTYPE), LATENT_HEADS
    )


@torch.inference_mode()
def attend(attention: Attention, inputs: Inputs) -> list[Tensor]:
    """Returns the output of each layer. The inputs stay as they are."""
    copies = [
        (q.clone(), latents.clone(), keys.clone(), up(), None if choice is None else Index(*map(Tensor.clone, choice)))
        for q, latents, keys, choice in inputs
    ]
    return [attention.attend_latents(layer, *of_layer) for layer, of_layer in enumerate(copies)]


def run(cache: TvmCache, appends: dict[int, int], inputs: Inputs) -> list[Tensor]:
    plan = cache.begin_forward(list(appends), list(appends.values()))
    outputs = attend(plan.attention, inputs)
    cache.end_forward(plan)
    return outputs


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_graph_gives_what_the_eager_step_gives(layout: KVLayout) -> None:
    """One capture, replayed with batches of other sizes, of sequences that choose and that do not."""
    cache, twin = (cache_over(layout, pools(layout)) for _ in range(2))
    for of in (cache, twin):
        for sequence in PROMPTS:
            of.add_sequence(sequence)
        run(of, PROMPTS, draw(sum(PROMPTS.values()), seed=0))
    (batch,) = cache.graph_buffers([Limits.of_step(8, HEADS, 1)])
    static = draw(8, seed=0)
    batch.clear()
    attend(batch.attention(), static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = attend(batch.attention(), static)
    for step in range(20):
        sequences = np.array([s for s in PROMPTS if (s + step) % 3 or step % 2])
        inputs, count = draw(len(sequences), seed=step), len(sequences)
        for (*places, place), (*tensors, tensor) in zip(static, inputs, strict=True):
            for at, given in zip([*places, *(place or ())], [*tensors, *(tensor or ())], strict=True):
                at[:count] = given
        cache.begin(Batch(sequences), batch, [np.zeros(count, np.int64)])
        graph.replay()
        expected = run(twin, dict.fromkeys(sequences.tolist(), 1), inputs)
        for actual, wanted in zip(outputs, expected, strict=True):
            assert_close(actual[:count], wanted)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("writer_class", [PeerWriter, UnmappedWriter], ids=["from the append kernel", "by the writer"])
def test_what_is_pushed_arrives_bit_for_bit(writer_class: type[PeerWriter], layout: KVLayout) -> None:
    both = [pools(layout) for _ in range(2)]
    writer = writer_class(0, both)
    sender, receiver = (cache_over(layout, its, writer) for its in both)
    for cache in (sender, receiver):
        cache.add_sequence(0)
    run(sender, {0: 300}, draw(300, seed=1))
    sender.mark_send(0, 0, receiver.prepare_receive(0, 420), 1)
    run(sender, {0: 100}, draw(100, seed=2))
    run(sender, {0: 20}, draw(20, seed=3))
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, 0, 420)
    keys = [cache.gather_group(0, 1, 0, 420)[0][0] for cache in (sender, receiver)]
    assert torch.equal(*keys)
