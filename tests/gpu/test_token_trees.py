"""Token trees on a GPU in 16 bits, beside a cache in float32, whose kernels are torch's and are tested on the CPU."""

from dataclasses import replace
from random import Random

import pytest
import torch

from tandem.cache.plan.kv_scales import KVScales
from tests.gpu.programs import Shape, run
from tests.support.tolerances import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
BF16, FP16 = torch.bfloat16, torch.float16
PER_HEAD = KVScales(((0.02, 0.015), (0.02, 0.013)), ((0.017, 0.02), (0.031, 0.01)))
SHAPES = {
    "bf16-128": Shape(BF16, q_heads=32, kv_heads=8, head_dim=128, page_size=16),
    "bf16-64-mqa": Shape(BF16, q_heads=12, kv_heads=1, head_dim=64, page_size=8),
    "bf16-64-group-7": Shape(BF16, q_heads=14, kv_heads=2, head_dim=64, page_size=64),
    "bf16-256": Shape(BF16, q_heads=4, kv_heads=2, head_dim=256, page_size=16),
    "bf16-128-softcap": Shape(BF16, q_heads=8, kv_heads=8, head_dim=128, page_size=16, softcap=3.0),
    "bf16-128-window": Shape(BF16, q_heads=32, kv_heads=8, head_dim=128, page_size=16, window=50),
    "bf16-64-window": Shape(BF16, q_heads=8, kv_heads=2, head_dim=64, page_size=8, window=7),
    "fp8-128": Shape(FP16, q_heads=32, kv_heads=8, head_dim=128, page_size=16, scales=KVScales.uniform(2, 0.02, 0.02)),
    "fp8-64-heads": Shape(FP16, q_heads=8, kv_heads=2, head_dim=64, page_size=8, scales=PER_HEAD),
}


def draw_parents(nodes: int, count: int, width: int) -> list[int]:
    random = Random(nodes + count)
    return [random.randint(max(-1, node - width), node - 1) for node in range(nodes, nodes + count)]


# What each sequence appends: a number of plain tokens, or parents.
PROGRAM: list[dict[int, int | list[int]]] = [
    {0: 300, 1: 7, 2: 128, 3: 64},
    {0: draw_parents(0, 64, 9), 1: 1, 2: draw_parents(0, 200, 40), 3: 20, 4: draw_parents(0, 3, 3)},
    {2: [0], 1: 1},
    {4: draw_parents(3, 61, 20), 0: draw_parents(64, 17, 60), 3: 1, 1: 1, 2: draw_parents(201, 55, 256)},
    {0: draw_parents(81, 1, 5), 4: draw_parents(64, 1, 5)},
]


@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_trees_beside_plain_sequences(shape: Shape, with_sinks: bool) -> None:
    """Trees of several shapes that grow, up to 256 nodes, one after nothing; then commits, then a plain forward."""
    exact = replace(shape, dtype=torch.float32)
    cache, twin = shape.cache(shape.pool()), exact.cache(exact.pool())
    sinks = torch.linspace(-2, 4, shape.q_heads, device="cuda") if with_sinks else None
    for sequence in range(5):
        cache.add_sequence(sequence)
        twin.add_sequence(sequence)
    steps = [*PROGRAM, {sequence: 1 for sequence in range(5)}]
    for step, appends in enumerate(steps):
        if step == len(PROGRAM):
            for of in (cache, twin):
                of.commit_token_tree([4, 0, 2], [64, -1, 255])
        lengths = {sequence: of if isinstance(of, int) else len(of) for sequence, of in appends.items()}
        parents = [None if isinstance(of, int) else of for of in appends.values()]
        inputs = shape.draw(sum(lengths.values()), seed=step)
        same = [(q.float(), k.float(), v.float()) for q, k, v in inputs]
        expected = run(twin, lengths, same, sinks, parents)
        for own, other in zip(run(cache, lengths, inputs, sinks, parents), expected, strict=True):
            # K of 16 bits and of more is at times rounded to neighbouring entries of 8.
            assert_close(own if shape.scales is None else own.bfloat16(), other)
    for sequence in range(5):
        there = twin.first_position(sequence), twin.num_tokens(sequence)
        pairs = zip(cache.gather_kv(sequence, *there), twin.gather_kv(sequence, *there), strict=True)
        for (_, v), (_, given) in pairs:
            assert torch.equal(v, given.to(v.dtype))
