"""Latents and index keys in 8 bits, against a naive cache that rounds them by the definition of e4m3."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.cache.digest import digest_kv
from tandem.cache.kernels.torch import latent as torch_latent
from tandem.cache.kinds.index import IndexKeys
from tandem.cache.kinds.kv import KV
from tandem.cache.kinds.latent import Latent
from tandem.cache.plan.kind import LayerGroup
from tandem.cache.plan.kv_scales import FP8, Fp8Rows, KVScales
from tandem.cache.plan.layout import KVLayout
from tests.cache.naive import NaiveCache, cache_of, draw_inputs, pools_of, ropes_of, run
from tests.cache.peer_writer import PeerWriter
from tests.cache.rounding import round_rows
from tests.support.tolerances import assert_close

RANK, ROTATED = 150, 4  # two scales, of which the last has 22 numbers
LATENTS = LayerGroup((0, 2), Latent(RANK + ROTATED, RANK))
SCALES = KVScales(((1.0,), (0.02,), (1.0,)), ((1.0,), (0.03,), (1.0,)))
LAYOUT = KVLayout((LATENTS, LayerGroup((1,), KV(2, 8))), 4, torch.float32, SCALES)
INDEXED = KVLayout(
    (LayerGroup((0, 1), Latent(RANK + ROTATED, RANK)), LayerGroup((0,), IndexKeys(10, 6, 5))),
    4,
    torch.float32,
    KVScales.uniform(2),
)
PROGRAM = [{0: 9, 1: 1, 2: 4}, {0: 1, 1: 1, 2: 1}, {1: 6, 0: 1, 2: 11}, {2: 1, 3: 2}, {0: 1, 1: 1, 2: 1, 3: 1}]


@pytest.mark.parametrize("absorbed", [True, False, None], ids=["absorbed", "expanded", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype: torch.dtype, absorbed: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh prompts, chunks and decodes see what was stored, and nothing finer; also beside K and V."""
    if absorbed is not None:
        monkeypatch.setattr(torch_latent, "absorbed_is_cheaper", lambda appends, *_: np.full(appends.shape, absorbed))
    layout = replace(LAYOUT, dtype=dtype)
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


@pytest.mark.parametrize("layout", [LAYOUT, INDEXED], ids=["latents", "index keys"])
def test_forks_pops_and_gathered_entries(layout: KVLayout) -> None:
    """The copy of a page has the bytes of the page, and what is gathered is dequantized."""
    cache, twin = (cache_of(layout, rope=ropes_of(layout)) for _ in range(2))
    inputs = [draw_inputs(layout, count, seed) for seed, count in enumerate((11, 5))]
    for one in (cache, twin):
        one.add_sequence(1)
        run(one, [1], [11], inputs[0])
    cache.fork_sequence(1, 2, 6)
    cache.pop(1, 5)
    twin.pop(1, 5)
    expected = run(twin, [1], [5], inputs[1])
    for sequence in (1, 2):
        for output, wanted in zip(run(cache, [sequence], [5], inputs[1]), expected, strict=True):
            assert torch.equal(output, wanted)
    entries, latents = cache.gather_group(2, 0, 0, 6)[0]
    _, given, _ = inputs[0].layers[0]
    assert torch.equal(entries[:, :, :RANK].double(), round_rows(given[:6].double(), RANK)[:, :, :RANK])
    assert torch.equal(latents, entries[:, :, :RANK])


@pytest.mark.parametrize("layout", [LAYOUT, INDEXED], ids=["latents", "index keys"])
def test_what_is_sent_is_what_the_sender_stores(layout: KVLayout) -> None:
    """Cached positions page to page, computed ones token by token; the digests agree, and later tokens, too."""
    pools = [pools_of(layout, 32) for _ in range(2)]
    writer = PeerWriter(0, pools)
    sender, receiver = (cache_of(layout, rope=ropes_of(layout), pools=own, writer=writer) for own in pools)
    for cache in (sender, receiver):
        cache.add_sequence(0)
    run(sender, [0], [7], draw_inputs(layout, 7, seed=1))
    sender.mark_send(0, 0, receiver.prepare_receive(0, 18), 1)
    run(sender, [0], [10], draw_inputs(layout, 10, seed=2))
    run(sender, [0], [1], draw_inputs(layout, 1, seed=3))
    receiver.finish_receive(0)
    assert digest_kv(sender, 0, 0, 18) == digest_kv(receiver, 0, 0, 18)
    assert sender.bytes_sent(0) == 18 * layout.token_bytes
    assert {group for _, group, _, _ in writer.token_writes} == {0, 1}
    outputs = [run(cache, [0], [3], draw_inputs(layout, 3, seed=4)) for cache in (sender, receiver)]
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))


def test_bytes_of_deepseeks_rows() -> None:
    groups = LayerGroup((0,), Latent(576, 512)), LayerGroup((0,), IndexKeys(128, 64, 2048))
    layout = KVLayout(groups, 64, torch.bfloat16, KVScales.uniform(1))
    assert [layout.entry_bytes(group) for group in range(2)] == [512 + 4 * 4 + 64 * 2, 128 + 4]
    assert [layout.stored_dtype_of(group) for group in range(2)] == [FP8, FP8]
    assert layout.fingerprint != replace(layout, scales=None).fingerprint
    assert layout.fingerprint != replace(layout, dtype=torch.float16).fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_become_the_nearest_entries(dtype: torch.dtype) -> None:
    """Sizes go from one end of the dtype to the other, and around each power of two at which scales change."""
    rows = torch.randn(400, RANK + ROTATED, generator=torch.Generator().manual_seed(0))
    sizes = torch.linspace(-20, 13, 400) if dtype == torch.float16 else torch.linspace(-80, 80, 400)
    rows = (rows * 2 ** sizes[:, None]).to(dtype)
    rows[:40, :RANK] = 0
    for row, (exponent, step) in enumerate((e, s) for e in range(-5, 5) for s in (-1, 0, 1)):
        border = torch.tensor(1.75 * 2.0**exponent, dtype=dtype)
        towards = torch.tensor(math.inf * step if step else float(border), dtype=dtype)
        rows[row, 3] = torch.nextafter(border, towards)
    fp8 = Fp8Rows(RANK + ROTATED, RANK, dtype)
    stored = fp8.quantize(rows)
    assert stored.shape == (400, fp8.num_bytes)
    found = fp8.dequantize(stored)
    assert torch.equal(found, round_rows(rows.double(), RANK).to(dtype))
    assert torch.equal(found[:, RANK:], rows[:, RANK:])


def test_what_is_no_number_does_not_hide() -> None:
    fp8 = Fp8Rows(8, 8, torch.float32)
    rows = torch.ones(2, 8)
    rows[0, 1], rows[1, 1] = math.nan, math.inf
    found = fp8.dequantize(fp8.quantize(rows))
    assert found[0, 1].isnan()
    assert found[1, 1] > 1e38
