"""Sequences that slide go from worker to worker by every transport, with their maps as messages carry them."""

import pytest
import torch

from tandem.cache.attention.forward import Batch
from tandem.cache.plan.rope import RopeParameters
from tandem.transfer.transport import Transport
from tandem.transfer.wire_map import decode_map, encode_map
from tests.cache.naive import assert_same_kv
from tests.contracts.islands import NUM_PAGES
from tests.support.tvm_cache import TvmCache
from tests.transfer.layouts import two_groups

WINDOW, SINK, LENGTH = 9, 2, 21


def cache_on(transport: Transport) -> TvmCache:
    return TvmCache(
        transport.layout,
        transport.pools,
        max_sequences=2,
        max_sequence_length=40,
        rope=RopeParameters("default", 4),
        writer=transport,
    )


@torch.inference_mode()
def run(cache: TvmCache, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    forward = cache.begin(Batch([0], [count]))
    for group in cache.layout.groups:
        for layer in group.layers:
            heads = 2 * group.num_kv_heads, group.num_kv_heads, group.num_kv_heads
            q, k, v = (torch.randn(count, of, group.head_dim, generator=generator) for of in heads)
            forward.attention.attend(layer, q, k, v)
    cache.commit(forward)


@pytest.mark.parametrize("config", [two_groups()], indirect=True, ids=["float32"])
@pytest.mark.parametrize("slides", [True, False], ids=["sliding", "plain"])
def test_what_a_window_shows_lands(island: list[Transport], slides: bool) -> None:
    """The sender's sequence slides alike, or is a plain one."""
    sender, receiver = cache_on(island[0]), cache_on(island[1])
    for cache, its_own in ((sender, slides), (receiver, True)):
        cache.add_sequence(0)
        if its_own:
            cache.enable_sliding_window(0, WINDOW, SINK)
    run(sender, 7, seed=1)
    wire = encode_map(receiver.prepare_receive(0, LENGTH, rotated=not slides), sender.layout)
    position_map = decode_map(wire, sender.layout, num_pages=(NUM_PAGES,) * 2, expected_start=0, expected_tokens=LENGTH)
    sender.mark_send(0, 0, position_map, 1)
    for begin in range(7, LENGTH, 5):
        run(sender, min(5, LENGTH - begin), seed=begin)
    assert sender.sends_done(0)
    island[0].quiet(1)
    receiver.finish_receive(0)
    for begin, end in ((0, SINK), (LENGTH - WINDOW + SINK, LENGTH)):
        assert_same_kv(sender, receiver, 0, 0, begin, end)
    if not slides:
        sender.enable_sliding_window(0, WINDOW, SINK)
    for cache in (sender, receiver):
        run(cache, 1, seed=99)
    assert_same_kv(sender, receiver, 0, 0, LENGTH - WINDOW + SINK + 1, LENGTH + 1)
