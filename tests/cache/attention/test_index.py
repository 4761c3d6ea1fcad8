"""Groups of index keys: what is sent with them, what layouts may have them, and what their layers take."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.cache.digest import digest_kv
from tandem.cache.kernels.base import Index
from tandem.cache.kernels.torch import index as torch_index
from tandem.cache.kernels.torch import latent as torch_latent
from tandem.cache.kinds.index import IndexKeys, index_keys
from tandem.cache.kinds.kind import check_gpu
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.latent import LatentHeads
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RopeParameters
from tests.cache.naive import cache_of, choice_of, draw_inputs, pools_of, ropes_of, run, run_layer, up_projections
from tests.cache.peer_writer import PeerWriter
from tests.support.kinds import changed

RANK, ROTATED, STILL, TOP_K = 8, 4, 6, 5
LATENTS = LayerGroup((0, 1), Latent(RANK + ROTATED, RANK))
KEYS = LayerGroup((0,), IndexKeys(STILL + ROTATED, STILL, TOP_K))
LAYOUT = KVLayout((LATENTS, KEYS), 4, torch.float32)


def test_index_keys_are_sent_beside_the_latents() -> None:
    """Cached ones page to page, computed ones token by token, bit for bit, and digests see them."""
    pools = [pools_of(LAYOUT, 32) for _ in range(2)]
    writer = PeerWriter(0, pools)
    sender, receiver = (cache_of(LAYOUT, rope=ropes_of(LAYOUT), pools=own, writer=writer) for own in pools)
    for cache in (sender, receiver):
        cache.add_sequence(0)
    run(sender, [0], [7], draw_inputs(LAYOUT, 7, seed=1))
    sender.mark_send(0, 0, receiver.prepare_receive(0, 18), 1)
    run(sender, [0], [10], draw_inputs(LAYOUT, 10, seed=2))
    run(sender, [0], [1], draw_inputs(LAYOUT, 1, seed=3))
    assert sender.sends_done(0)
    receiver.finish_receive(0)
    for group in range(2):
        pairs = zip(sender.gather_group(0, group, 0, 18), receiver.gather_group(0, group, 0, 18), strict=True)
        assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in pairs)
    assert {group for _, group, _ in writer.slot_writes} == {group for _, group, _, _ in writer.token_writes} == {0, 1}
    assert sender.bytes_sent(0) == 18 * (2 * (RANK + ROTATED) + STILL + ROTATED) * 4
    before = digest_kv(receiver, 0, 0, 18)
    assert before == digest_kv(sender, 0, 0, 18)
    outputs = [run(cache, [0], [3], draw_inputs(LAYOUT, 3, seed=4)) for cache in (sender, receiver)]
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))
    pools[1][1].view(torch.int32)[:] ^= 1
    assert digest_kv(receiver, 0, 0, 18) != before


def test_little_memory_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of one token at a time, and chosen entries, too."""
    inputs, outputs = draw_inputs(LAYOUT, 30, seed=0), []
    for _ in range(2):
        cache = cache_of(LAYOUT, rope=ropes_of(LAYOUT))
        cache.add_sequence(0)
        outputs.append(run(cache, [0], [30], inputs))
        monkeypatch.setattr(torch_index, "SCORES_AT_ONCE", 1)
        monkeypatch.setattr(torch_latent, "ENTRIES_AT_ONCE", 1)
    for few, many in zip(*outputs, strict=True):
        torch.testing.assert_close(few, many, rtol=1e-5, atol=1e-6)


def test_layouts_differ_by_what_is_chosen() -> None:
    assert (LAYOUT.num_layers, LAYOUT.layer_index, index_keys(LAYOUT)) == (2, {0: (0, 0), 1: (0, 1)}, {0: (1, 0)})
    assert LAYOUT.token_bytes == (2 * (RANK + ROTATED) + STILL + ROTATED) * 4
    prints = {replace(LAYOUT, groups=(LATENTS, changed(KEYS, top_k=top_k))).fingerprint for top_k in (4, 5)}
    assert len({*prints, replace(LAYOUT, groups=(LATENTS,)).fingerprint}) == 3


@pytest.mark.parametrize(
    "groups",
    [
        (LATENTS, replace(KEYS, layers=(1,))),
        (LATENTS, replace(KEYS, layers=(0, 2))),
        (LATENTS, replace(KEYS, layers=())),
        (LATENTS, KEYS, KEYS),
        (LayerGroup((0, 1), KV(2, 8)), KEYS),
    ],
    ids=["not the first", "of no layer", "of none", "twice", "of K and V"],
)
def test_layouts_that_cannot_be(groups: tuple[LayerGroup, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"has index keys of layers .* the first of these among them"):
        KVLayout(groups, 4, torch.float32)


def test_what_kernels_on_a_gpu_take() -> None:
    groups = LayerGroup((0,), Latent(576, 512)), LayerGroup((0,), IndexKeys(128, 64, 2048))
    layout = KVLayout(groups, 64, torch.bfloat16)
    check_gpu(layout, LatentHeads(128, 128))
    narrow = changed(groups[1], head_dim=96, still=32)
    with pytest.raises(InvalidArgument, match="index_head_dim is 96; on a GPU it must be one of 128"):
        check_gpu(replace(layout, groups=(groups[0], narrow)), LatentHeads(128, 128))


def test_top_k_is_at_least_one() -> None:
    with pytest.raises(InvalidArgument, match="top_k of group 1 is 0"):
        KVLayout((LATENTS, changed(KEYS, top_k=0)), 4, torch.float32)


def test_the_rotated_parts_must_fit() -> None:
    with pytest.raises(InvalidArgument, match="rotary_dim is 2; entries of its group end in 4 rotated"):
        cache_of(LAYOUT, rope=[ropes_of(LAYOUT)[0], RopeParameters("default", 2)])


def test_calls_that_do_not_fit() -> None:
    cache = cache_of(LAYOUT, rope=ropes_of(LAYOUT))
    cache.add_sequence(0)
    plan = cache.begin_forward([0], [3])
    (q, entries, latents), (other_q, other, _) = draw_inputs(LAYOUT, 3, seed=0).layers
    up = up_projections(RANK)
    choice = choice_of(LAYOUT, 0, q, entries)
    assert choice is not None

    def attend(layer: int, choice: Index | None) -> None:
        cache.latent_attention(plan, layer, q, latents[:, 0], entries[:, 0, RANK:], up, choice)

    with pytest.raises(InvalidArgument, match="choice is None; layer 0 has index keys"):
        attend(0, None)
    with pytest.raises(InvalidArgument, match="choice is given; layer 1 has no index keys"):
        attend(1, choice)
    for name, wrong in (
        ("q", choice.q[:, :, 1:]),
        ("still", choice.still[:2]),
        ("rotated", choice.rotated[:, 1:]),
        ("weights", choice.weights.double()),
    ):
        with pytest.raises(InvalidArgument, match=rf"index\.{name} is \(\d"):
            attend(0, choice._replace(**{name: wrong}))
    run_layer(cache, plan, 0, q, entries, latents)
    run_layer(cache, plan, 1, other_q, other, other[:, :, :RANK])
    cache.end_forward(plan)
    assert cache.num_tokens(0) == 3
    assert np.isfinite(cache.gather_group(0, 1, 0, 3)[0][0].numpy()).all()
