"""Sequences that share pages, on a GPU: FlashInfer over segments and own pages, against attention to all of each."""

import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.choice import choose_kernels
from tests.cache.sharing_kernels import sharing_all
from tests.gpu.programs import Reference, Shape
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
BF16 = torch.bfloat16
SHAPES = {
    "bf16-128": Shape(BF16, q_heads=32, kv_heads=8, head_dim=128, page_size=16),
    "bf16-64-group-7": Shape(BF16, q_heads=14, kv_heads=2, head_dim=64, page_size=64),
    "bf16-64-mqa-softcap": Shape(BF16, q_heads=8, kv_heads=1, head_dim=64, page_size=8, softcap=3.0),
}


class Twins:
    def __init__(self, shape: Shape, sinks: Tensor | None = None) -> None:
        self.shape, self.sinks = shape, sinks
        self.cache = TvmCache(
            shape.layout,
            (shape.pool(),),
            max_sequences=16,
            max_sequence_length=1024,
            rope=shape.rope,
            writer=None,
            softcap=shape.softcap,
            kernels=sharing_all(choose_kernels),
        )
        self.reference = Reference(shape, sinks)
        self.seed = 0

    def fork(self, parent: int, child: int, position: int) -> None:
        self.cache.fork_sequence(parent, child, position)
        self.reference.fork(parent, child, position)

    def run(self, appends: dict[int, int]) -> int:
        """The number of segments of the forward, whose outputs are compared."""
        self.seed += 1
        inputs = self.shape.draw(sum(appends.values()), seed=self.seed)
        plan = self.cache.begin_forward(list(appends), list(appends.values()))
        with torch.inference_mode():
            outputs = [self.cache.attention(plan, layer, *qkv, self.sinks) for layer, qkv in enumerate(inputs)]
        self.cache.end_forward(plan)
        for actual, expected in zip(outputs, self.reference.run(appends, inputs), strict=True):
            assert_close(actual, expected)
        shared = plan.attention.plans[0].tables.shared
        return 0 if shared is None else shared.qo_indptr.size - 1


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_forks_of_forks(name: str, with_sinks: bool) -> None:
    shape = SHAPES[name]
    sinks = torch.linspace(-2, 4, shape.q_heads, device="cuda", dtype=BF16) if with_sinks else None
    twins = Twins(shape, sinks)
    twins.cache.add_sequence(0)
    twins.run({0: 5 * shape.page_size + 3})
    for child in (1, 2, 3):
        twins.fork(0, child, 5 * shape.page_size)
    twins.run({1: 2 * shape.page_size, 2: shape.page_size + 1})
    for parent, child in ((1, 4), (1, 5), (2, 6)):
        twins.fork(parent, child, twins.cache.num_tokens(parent))
    twins.cache.add_sequence(7)
    for _ in range(3):
        assert twins.run(dict.fromkeys((7, 3, 5, 0, 1, 2, 4, 6), 1)) == 3
    assert twins.run({7: 9, 3: 1, 5: 1, 0: 2, 4: 1, 6: 1}) == 2  # beside prompts


def test_plans_of_many_forwards_may_be_made_ahead() -> None:
    """The wrappers keep what was planned last: one that shares, one that does not."""
    shape = SHAPES["bf16-128"]
    twins = Twins(shape)
    twins.cache.add_sequence(0)
    twins.cache.add_sequence(9)
    twins.run({0: 50, 9: 5})
    twins.fork(0, 1, 50)
    batches = [{0: 1, 1: 1}, {9: 1}]
    plans = [twins.cache.begin_forward(list(batch), list(batch.values())) for batch in batches]
    inputs = [shape.draw(sum(batch.values()), seed=seed) for seed, batch in enumerate(batches, start=50)]
    expected = [twins.reference.run(batch, of) for batch, of in zip(batches, inputs, strict=True)]
    for layer in range(2):
        for plan, of, outputs in zip(plans, inputs, expected, strict=True):
            with torch.inference_mode():
                assert_close(twins.cache.attention(plan, layer, *of[layer]), outputs[layer])
