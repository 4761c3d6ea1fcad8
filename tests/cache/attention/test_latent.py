"""Groups that keep latents: both ways to attend against a naive cache, the choice between them, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.cache.digest import digest_kv
from tandem.cache.kernels.base import Latents
from tandem.cache.kernels.torch import latent as torch_latent
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import EXPANDED_POSITIONS, LatentHeads, absorbed_is_cheaper, heads_at_once
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import (
    LATENT_HEADS,
    QUERY_HEADS,
    NaiveCache,
    assert_same_kv,
    cache_of,
    draw_inputs,
    layout_of,
    pools_of,
    ropes_of,
    run,
    run_layer,
    up_projections,
)
from tests.cache.peer_writer import PeerWriter
from tests.support.kinds import changed
from tests.support.tolerances import assert_close
from tests.support.tvm_cache import TvmCache

RANK, ROTATED = 8, 4
GROUP = LayerGroup((0, 1), Latent(RANK + ROTATED, RANK))
LAYOUT = KVLayout((GROUP,), 4, torch.float32)
BESIDE_KV = KVLayout((replace(GROUP, layers=(0, 2)), LayerGroup((1,), KV(2, 8))), 4, torch.float32)
DEEPSEEK = LatentHeads(key_dim=128, value_dim=128)
# Prompts, decodes of unlike lengths, chunks after others, and all of them at once.
PROGRAM = [{0: 9, 1: 1, 2: 4}, {0: 1, 1: 1, 2: 1}, {1: 6, 0: 1, 2: 11}, {2: 1, 3: 2}, {0: 1, 1: 1, 2: 1, 3: 1}]


@pytest.mark.parametrize("absorbed", [True, False, None], ids=["absorbed", "expanded", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [LAYOUT, BESIDE_KV], ids=["latents", "beside K and V"])
def test_attention(
    layout: KVLayout, dtype: torch.dtype, absorbed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absorbed is not None:
        monkeypatch.setattr(torch_latent, "absorbed_is_cheaper", lambda appends, *_: np.full(appends.shape, absorbed))
    layout = replace(layout, dtype=dtype)
    ropes = ropes_of(layout)
    cache, naive = cache_of(layout, rope=ropes), NaiveCache(layout, ropes)
    for sequence in range(4):
        cache.add_sequence(sequence)
        naive.add(sequence)
    for step, appends in enumerate(PROGRAM):
        inputs = draw_inputs(layout, sum(appends.values()), seed=step)
        outputs = run(cache, list(appends), list(appends.values()), inputs)
        for actual, expected in zip(outputs, naive.run(list(appends), list(appends.values()), inputs), strict=True):
            assert_close(actual, expected)


def test_the_cheaper_way_by_deepseeks_sizes() -> None:
    def absorbed(append: int, length: int) -> bool:
        arrays = np.array([append], np.int32), np.array([length], np.int32)
        return bool(absorbed_is_cheaper(*arrays, 512, 64, DEEPSEEK)[0])

    assert absorbed(1, 1)
    assert absorbed(1, 100_000)
    assert not absorbed(8192, 8192)
    assert absorbed(100, 30_000)
    assert not absorbed(200, 30_000)
    assert absorbed(2, 3)
    assert not absorbed(50, 50)


def test_no_more_is_expanded_than_memory_is_set_aside_for() -> None:
    lengths = np.array([EXPANDED_POSITIONS // 2, 40_000, EXPANDED_POSITIONS // 2, 1000], np.int32)
    appends = np.array([8192, 1, 8192, 1000], np.int32)
    assert absorbed_is_cheaper(appends, lengths, 512, 64, DEEPSEEK).tolist() == [False, True, False, True]
    assert absorbed_is_cheaper(lengths[:1] * 3, lengths[:1] * 3, 512, 64, DEEPSEEK).all()


def test_heads_are_cut_where_k_and_v_of_all_would_be_large() -> None:
    assert heads_at_once(128, 8192) == 128
    assert heads_at_once(128, 8193) == 64
    assert heads_at_once(6, 1 << 19) == 2
    assert heads_at_once(7, 1 << 30) == 1


def test_what_is_pushed_arrives_bit_for_bit() -> None:
    """Cached positions page to page, computed ones token by token; the digests agree."""
    pools = [pools_of(BESIDE_KV, 32) for _ in range(2)]
    writer = PeerWriter(0, pools)
    sender, receiver = (
        TvmCache(
            BESIDE_KV,
            own,
            max_sequences=2,
            max_sequence_length=64,
            rope=ropes_of(BESIDE_KV),
            writer=writer,
            latent=LATENT_HEADS,
        )
        for own in pools
    )
    for cache in (sender, receiver):
        cache.add_sequence(0)
    run(sender, [0], [7], draw_inputs(BESIDE_KV, 7, seed=1))
    sender.mark_send(0, 0, receiver.prepare_receive(0, 18), 1)
    run(sender, [0], [10], draw_inputs(BESIDE_KV, 10, seed=2))
    run(sender, [0], [1], draw_inputs(BESIDE_KV, 1, seed=3))
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    assert_same_kv(sender, receiver, 0, 0, 0, 18)
    assert digest_kv(sender, 0, 0, 18) == digest_kv(receiver, 0, 0, 18)
    assert {group for _, group, _ in writer.slot_writes} == {group for _, group, _, _ in writer.token_writes} == {0, 1}
    assert sender.bytes_sent(0) == 18 * (2 * (RANK + ROTATED) + 2 * 2 * 8) * 4


def test_a_page_holds_one_plane_and_layouts_differ_by_their_rank() -> None:
    assert LAYOUT.page_shape(0) == (2, 1, 1, 4, RANK + ROTATED)
    groups = (GROUP, changed(GROUP, rank=RANK - 2), replace(GROUP, kind=KV(1, RANK + ROTATED)))
    prints = {replace(LAYOUT, groups=(group,)).fingerprint for group in groups}
    assert len(prints) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, r"rank 0; it must be from 1 to 11"),
        ({"rank": 12}, r"rank 12; it must be from 1 to 11"),
    ],
)
def test_groups_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KVLayout((changed(GROUP, **change),), 4, torch.float32)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        (LAYOUT, {"latent": None}, "latent is None; it must be given exactly when"),
        (layout_of(2), {"latent": LATENT_HEADS}, "it must be given exactly when"),
        (LAYOUT, {"latent": LatentHeads(0, 8)}, "both sizes must be at least 1"),
        (LAYOUT, {"softcap": 3.0}, "softcap is 3.0; with latents it must be None"),
        (LAYOUT, {"rope": RopeParameters("default", RANK)}, "rotary_dim is 8; entries of its group end in 4 rotated"),
    ],
)
def test_caches_that_cannot_be(layout: KVLayout, change: dict[str, object], message: str) -> None:
    options = {"rope": ropes_of(layout), "latent": LATENT_HEADS, "writer": None} | change
    with pytest.raises(InvalidArgument, match=message):
        TvmCache(layout, pools_of(layout, 4), max_sequences=1, max_sequence_length=16, **options)  # type: ignore[arg-type]


def test_calls_that_do_not_fit() -> None:
    cache = cache_of(BESIDE_KV, rope=ropes_of(BESIDE_KV))
    cache.add_sequence(0)
    plan = cache.begin_forward([0], [3])
    (q, entries, latents), (q_kv, k, v), _ = draw_inputs(BESIDE_KV, 3, seed=0).layers
    up = up_projections(RANK)
    with pytest.raises(InvalidArgument, match="layer is 0, which keeps latents; attend_latents"):
        cache.attention(plan, 0, q_kv, k, v)
    with pytest.raises(InvalidArgument, match="layer is 0, which keeps latents; attend_latents"):
        plan.attention.run(0, Latents(q, latents[:, 0], entries[:, 0, RANK:], up))
    with pytest.raises(InvalidArgument, match="layer is 1, which keeps no latents; attend"):
        cache.latent_attention(plan, 1, q, latents[:, 0], entries[:, 0, RANK:], up)
    with pytest.raises(InvalidArgument, match=r"q is \(2, 4, 10\).*; it must be \(3, 4, 10\)"):
        run_layer(cache, plan, 0, q[:2], entries[:2], latents[:2])
    with pytest.raises(InvalidArgument, match=r"keys is \(3, 3\).*; it must be \(3, 4\)"):
        cache.latent_attention(plan, 0, q, latents[:, 0], entries[:, 0, RANK + 1 :], up)
    with pytest.raises(InvalidArgument, match=rf"q is \(3, {QUERY_HEADS}, 9\)"):
        cache.latent_attention(plan, 0, q[:, :, 1:], latents[:, 0], entries[:, 0, RANK:], up)
