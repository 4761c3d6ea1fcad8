"""Layers with K and V in one plane, and with compressed KV beside it: which layouts and calls are refused by name. What
they compute, tests/cache/operations/test_programs.py compares."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.base import Compression
from tandem.cache.kernels.torch.compressed import rotate_neighbours
from tandem.cache.kinds.compressed import CompressedGroups, compressed_groups
from tandem.cache.kinds.index import index_keys
from tandem.cache.kinds.kv import KV
from tandem.cache.operations import forwards
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import KVScales
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.rope import RotaryEmbedding
from tandem.cache.plan.spans import ALL, Every, Window
from tests.cache.compressed_inputs import compression_of
from tests.cache.naive import HEAD_DIM, ROPE, pools_of
from tests.cache.settings import SHARED
from tests.support.kinds import changed
from tests.support.tvm_cache import TvmCache

HEADS, TOKENS = 4, 9
SINKS = torch.zeros(HEADS)
INPUTS, ENTRIES, KEYS = SHARED.groups[1:4]


def test_the_groups_of_each_layer() -> None:
    assert compressed_groups(SHARED) == {1: CompressedGroups(1, 2, 3, 2), 2: CompressedGroups(4, 5, None, None)}
    assert index_keys(SHARED) == {}
    assert [place[0] for place in SHARED.layer_index.values()] == [0, 0, 0]


@pytest.mark.parametrize(
    "beside",
    [
        [INPUTS],
        [ENTRIES],
        [INPUTS, KEYS],
        [INPUTS, ENTRIES, KEYS, changed(ENTRIES, keeps=Every(8))],
        [changed(INPUTS, keeps=ALL), ENTRIES, KEYS],
        [changed(INPUTS, keeps=Window(12)), ENTRIES, KEYS],
        [changed(INPUTS, keeps=Window(6)), ENTRIES, KEYS],
        [changed(INPUTS, head_dim=HEAD_DIM), ENTRIES, KEYS],
        [changed(INPUTS, planes=1), ENTRIES, KEYS],
        [INPUTS, changed(ENTRIES, planes=2), KEYS],
        [INPUTS, ENTRIES, changed(KEYS, keeps=Every(8))],
        [changed(INPUTS, head_dim=2 * (HEAD_DIM + 2 + 6)), changed(ENTRIES, head_dim=HEAD_DIM + 2), KEYS],
    ],
)
def test_groups_beside_that_hold_no_compressed_kv(beside: list[LayerGroup]) -> None:
    with pytest.raises(InvalidArgument, match="layer 1, of K and V in one plane, has groups beside it that keep "):
        replace(SHARED, groups=(SHARED.groups[0], *beside))


def test_one_plane_is_neither_scaled_nor_read() -> None:
    alone = replace(SHARED, groups=SHARED.groups[:1])
    with pytest.raises(InvalidArgument, match=r"scales are given, but the layout has .* with one plane"):
        replace(alone, scales=KVScales(((1.0,),) * 3, ((1.0,),) * 3))
    with pytest.raises(InvalidArgument, match="layer 3 would read layer 1"):
        replace(alone, readers=((3, 1),))


def made(layout: KVLayout) -> TvmCache:
    rope = replace(ROPE, rotary_dim=4)
    cache = TvmCache(layout, pools_of(layout, 20), max_sequences=2, max_sequence_length=40, rope=rope, writer=None)
    cache.add_sequence(0)
    return cache


def given(layer: int, count: int = TOKENS) -> tuple[Tensor, Tensor, Compression | None]:
    generator = torch.Generator().manual_seed(layer)
    q, kv = (torch.randn(count, heads, HEAD_DIM, generator=generator) for heads in (HEADS, 1))
    return q, kv, compression_of(SHARED, layer, q, kv)


Change = Callable[[Any], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"values": x.values[:, 1:]}, "k is "),
        (lambda x: {"gates": x.gates.half()}, "v is "),
        (lambda x: {"bias": x.bias[1:]}, r"compression.bias is \(3, 28\)"),
        (lambda x: {"norms": x.norms[:1]}, r"compression.norms have shapes \[\(8,\)\]; they must be \[8, 6\]"),
        (lambda _: {"query": None}, "compression.query must be given exactly where the layer has index keys"),
        (lambda x: {"query": x.query._replace(q=x.query.q[1:])}, "query.q is "),
        (lambda x: {"query": x.query._replace(weights=x.query.weights.double())}, "query.weights is "),
    ],
)
@pytest.mark.parametrize("by_token", [False, True], ids=["by sequence", "by token"])
def test_compressions_that_do_not_fit(
    change: Change, message: str, by_token: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "takes_by_token", lambda groups, tokens: by_token)
    cache = made(SHARED)
    plan = cache.begin_forward([0], [TOKENS])
    q, kv, compression = given(1)
    assert compression is not None
    with pytest.raises(InvalidArgument, match=message):
        cache.shared_attention(plan, 1, q, kv, SINKS, compression._replace(**change(compression)))


def test_calls_that_do_not_fit() -> None:
    cache = made(SHARED)
    plan = cache.begin_forward([0], [TOKENS])
    q, kv, compression = given(1)
    for layer, its in ((0, compression), (1, None)):
        with pytest.raises(InvalidArgument, match="compression must be given exactly where a layer has compressed KV"):
            cache.shared_attention(plan, layer, q, kv, SINKS, its)
    with pytest.raises(InvalidArgument, match="kv is "):
        cache.shared_attention(plan, 1, q, kv[:, 0], SINKS, compression)
    with pytest.raises(InvalidArgument, match="sinks is "):
        cache.shared_attention(plan, 1, q, kv, SINKS[1:], compression)
    with pytest.raises(InvalidArgument, match="layer is 1, which keeps K and V in one plane; attend_shared"):
        cache.attention(plan, 1, q, kv, kv)
    plain = made(KVLayout((LayerGroup((0,), KV(1, HEAD_DIM)),), 4, torch.float32))
    with pytest.raises(InvalidArgument, match="layer is 0, whose K and V are not in one plane; attend"):
        plain.shared_attention(plain.begin_forward([0], [TOKENS]), 0, q, kv, SINKS)


def test_a_layer_that_stored_no_entries_is_missed() -> None:
    """The layers of a forward are counted in all groups."""
    cache = made(SHARED)
    plan = cache.begin_forward([0], [TOKENS])
    for layer in (0, 1):
        q, kv, compression = given(layer)
        cache.shared_attention(plan, layer, q, kv, SINKS, compression)
    with pytest.raises(InvalidArgument, match=r"layers \[2\] of the plan never ran"):
        cache.end_forward(plan)
    q, kv, compression = given(2)
    cache.shared_attention(plan, 2, q, kv, SINKS, compression)
    cache.end_forward(plan)


def test_rotation_there_and_back() -> None:
    rotation = RotaryEmbedding(replace(ROPE, rotary_dim=4), 32, "cpu", torch.float32).rotation(torch.arange(32))
    x = torch.randn(32, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    turned = rotate_neighbours(x, rotation)
    assert torch.equal(turned[..., :4], x[..., :4])
    assert float((turned - x)[1:, :, 4:].abs().amax(-1).min()) > 1e-3
    torch.testing.assert_close(rotate_neighbours(turned, rotation, back=True), x)
    assert rotate_neighbours(x, None) is x
