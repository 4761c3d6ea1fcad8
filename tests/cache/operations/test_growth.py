"""Steps launched ahead: with windows, pages that the step in flight sees are not taken away yet."""

import torch

from tandem.cache.attention.forward import Batch
from tandem.cache.kernels.base import Limits
from tandem.cache.kinds.kv import KV
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tandem.cache.plan.spans import Window
from tests.cache.table_kernels import TableKernels
from tests.support.tvm_cache import TvmCache

WINDOW, PAGE_SIZE, STEPS = 5, 4, 20
LAYOUT = KVLayout((LayerGroup((0,), KV(1, 4, Window(WINDOW))),), PAGE_SIZE, torch.float32)


def make_cache() -> TvmCache:
    pool = torch.zeros(20, *LAYOUT.page_shape(0))
    cache = TvmCache(
        LAYOUT,
        (pool,),
        max_sequences=1,
        max_sequence_length=64,
        rope=RopeParameters("none", 4),
        writer=None,
        kernels=TableKernels,
    )
    cache.add_sequence(0)
    cache.begin_forward([0], [1])
    return cache


def first_seen(position: int) -> int:
    return max(position - WINDOW + 1, 0)


def test_a_fixed_step_keeps_what_the_step_before_sees() -> None:
    cache = make_cache()
    (batch,) = cache.graph_buffers([Limits.of_step(2, 1, 0)])
    kept = []
    for _ in range(STEPS):
        position = cache.num_tokens(0)
        cache.begin(Batch([0]), batch)
        kept.append(cache.first_position(0) <= first_seen(position - 1))
    assert all(kept)
    assert cache.first_position(0) > 0


def test_a_plain_forward_does_not() -> None:
    cache, kept = make_cache(), []
    for _ in range(STEPS):
        position = cache.num_tokens(0)
        cache.begin_forward([0], [1])
        kept.append(cache.first_position(0) <= first_seen(position - 1))
    assert not all(kept)


def test_a_reservation_for_two_suffices_for_steps_ahead() -> None:
    """No step takes a page beyond those that were set aside."""
    cache = make_cache()
    (batch,) = cache.graph_buffers([Limits.of_step(1, 1, 0)])
    cache.reserve(0, 40, longest_append=2)
    free = cache.num_free_pages
    for _ in range(39):
        cache.begin(Batch([0]), batch)
        assert cache.num_free_pages >= free
