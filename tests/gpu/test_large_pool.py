"""Pages whose elements lie past what 32 bits count: append, attention and page reads are right there too."""

import pytest
import torch

from tests.gpu.programs import Reference, Shape, run
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
SHAPE = Shape(torch.bfloat16, q_heads=32, kv_heads=8, head_dim=128, page_size=64)
PAGE_ELEMENTS = SHAPE.layout.page_bytes(0) // SHAPE.layout.dtype.itemsize
TAKEN_PAGES = (1 << 32) // PAGE_ELEMENTS + 1
PROGRAM = [{0: 300, 1: 7}, {0: 1, 1: 1}, {1: 90, 0: 1}]


def test_attention_past_two_to_the_32_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 2 * SHAPE.layout.page_bytes(0) * TAKEN_PAGES:
        pytest.skip("needs a GPU with more free memory")
    taken_tokens = TAKEN_PAGES * SHAPE.page_size
    cache = TvmCache(
        SHAPE.layout,
        (SHAPE.pool(TAKEN_PAGES + 40),),
        max_sequences=8,
        max_sequence_length=taken_tokens,
        rope=SHAPE.rope,
        writer=None,
    )
    cache.add_sequence(9)
    assert int(cache.prepare_receive(9, taken_tokens).runs[0].slots().max()) == taken_tokens - 1  # the pages below
    reference = Reference(SHAPE)
    for sequence in (0, 1):
        cache.add_sequence(sequence)
    for step, appends in enumerate(PROGRAM):
        inputs = SHAPE.draw(sum(appends.values()), seed=step)
        for actual, expected in zip(run(cache, appends, inputs), reference.run(appends, inputs), strict=True):
            assert_close(actual, expected)
