"""Latents and index keys of 8 bits in Triton kernels, against Fp8Rows and torch's kernels: on a GPU, else in Triton's
interpreter."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import FP8, Fp8Rows
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.cache.kernels.base import GroupPlan, Index, Latents, Limits
from tandem.cache.kernels.entry_tiling import FEW
from tandem.cache.kernels.flashinfer import latent as flashinfer_latent
from tandem.cache.kernels.flashinfer import latent_fp8
from tandem.cache.kernels.flashinfer.eager import PlannedWrappers
from tandem.cache.kernels.flashinfer.latent_fp8 import Fp8LatentKernels
from tandem.cache.kernels.gpu_limits import RANK, ROTATED
from tandem.cache.kernels.index_keys import Choosers
from tandem.cache.kernels.page_memory import PageOperations
from tandem.cache.kernels.torch import latent as torch_latent
from tandem.cache.kernels.torch.index import TorchIndexKernels
from tandem.cache.kernels.torch.latent import TorchLatentKernels
from tandem.cache.kernels.triton import chosen as triton_chosen
from tandem.cache.kernels.triton import index as triton_index
from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.triton.chosen import attend_chosen, attend_seen
from tandem.cache.kernels.triton.gather import gather_rows
from tandem.cache.kernels.triton.index import TritonIndexKernels, cut_tiles
from tandem.cache.kernels.triton.index_scores import SeenPages
from tandem.cache.kernels.triton.latent_append import append_latents
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tests.cache.kernels.test_triton_index import Case, device_tables, draw, draw_index, lay_out

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, LAYERS, LAYER, PAGE_SIZE, TOKENS, HEADS = 48, 2, 1, 8, 5, 3
LATENT_HEADS = LatentHeads(128, 128)
LATENTS = {  # rank and rotated part
    "one scale": (32, 16, torch.float32),
    "two, of a part": (150, 12, torch.float32),
    "DeepSeek's": (RANK, ROTATED, torch.bfloat16),
    "float16": (256, 8, torch.float16),
}


def empty_pool(fp8: Fp8Rows) -> Tensor:
    """Full of NaN: what was never written must not matter."""
    return torch.full((PAGES, LAYERS, 1, 1, PAGE_SIZE, fp8.num_bytes), torch.nan, dtype=FP8, device=DEVICE)


def representable(x: Tensor) -> Tensor:
    """Triton's interpreter rounds wrongly, and does not take subnormal entries well: there, numbers like x that need no
    rounding."""
    if DEVICE != "cpu":
        return x
    fp8 = Fp8Rows(x.shape[-1], x.shape[-1], x.dtype)
    rounded = fp8.dequantize(fp8.quantize(x))
    return rounded.masked_fill(rounded.abs() < rounded.abs().amax(-1, keepdim=True) * 2.0**-10, 0)


def stored_pool(fp8: Fp8Rows, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A pool of stored rows, and the numbers that they mean, [pages, layers, page_size, width]."""
    rows = draw(Case(dtype=fp8.dtype), PAGES, LAYERS, 1, 1, PAGE_SIZE, fp8.width, seed=seed)
    stored = fp8.quantize(representable(rows))
    return stored, fp8.dequantize(stored)[:, :, 0, 0]


def unlike(x: Tensor) -> Tensor:
    """Rows of sizes that are far apart; one is 0."""
    sizes = torch.tensor([1.0, 2.0**-9, 300.0, 0.0, 0.03], device=DEVICE)
    return (x * sizes[:, None]).to(x.dtype)


@pytest.mark.parametrize(("rank", "rotated", "dtype"), LATENTS.values(), ids=LATENTS)
def test_latents_are_stored_as_the_reference_stores_them(rank: int, rotated: int, dtype: torch.dtype) -> None:
    """Rows in own slots, in a peer's and in kept ones are equal bit for bit. There is no rotation, which would round
    differently."""
    fp8, case = Fp8Rows(rank + rotated, rank, dtype), Case(dtype=dtype)
    latents, keys = unlike(draw(case, TOKENS, rank)), draw(case, TOKENS, rotated, seed=1)
    check_stored(fp8, representable(latents), keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_scale_is_of_both_parts_of_an_index_key(dtype: torch.dtype) -> None:
    """The largest number is now in one part, now in the other."""
    fp8, case = Fp8Rows(40, 40, dtype), Case(dtype=dtype)
    keys = representable(torch.cat((unlike(draw(case, TOKENS, 24)), draw(case, TOKENS, 16, seed=1)), 1))
    check_stored(fp8, *keys.split((24, 16), 1))


def check_stored(fp8: Fp8Rows, first: Tensor, second: Tensor) -> None:
    pool, peer = empty_pool(fp8), empty_pool(fp8)
    slots = torch.tensor([3, 17, 380, -1, 8], dtype=torch.int32, device=DEVICE)
    to_peer = [None, 11, None, 25, None]
    addresses = [0 if slot is None else peer[slot // 8, 0, 0, 0, slot % 8].data_ptr() for slot in to_peer]
    targets = AppendTargets(slots, torch.tensor(addresses, dtype=torch.int64, device=DEVICE))
    q = draw(Case(dtype=fp8.dtype), TOKENS, HEADS, 16 + second.shape[1], seed=2)
    kept = append_latents(pool, LAYER, q, first, second, None, targets, keep=True, fp8=fp8)
    expected = fp8.quantize(torch.cat((first, second), 1))
    assert kept is not None
    assert torch.equal(kept[:, 0].view(torch.uint8), expected.view(torch.uint8))
    for its, given in ((pool, slots.tolist()), (peer, to_peer)):
        whole = empty_pool(fp8).view(torch.uint8)
        for token, slot in enumerate(given):
            if slot is not None and slot >= 0:
                whole[slot // PAGE_SIZE, LAYER, 0, 0, slot % PAGE_SIZE] = expected[token].view(torch.uint8)
        assert torch.equal(its.view(torch.uint8), whole)
    assert append_latents(pool, LAYER, q, first, second, None, targets, keep=False, fp8=fp8) is None


@pytest.mark.parametrize("whole", [False, True], ids=["latents", "index keys"])
@pytest.mark.parametrize(("rank", "rotated", "dtype"), LATENTS.values(), ids=LATENTS)
def test_gathered_rows(rank: int, rotated: int, dtype: torch.dtype, whole: bool) -> None:
    fp8 = Fp8Rows(rank + rotated, rank + rotated if whole else rank, dtype)
    pool, numbers = stored_pool(fp8)
    slots = torch.randint(PAGES * PAGE_SIZE, (11,), dtype=torch.int32).to(DEVICE)
    expected = numbers[slots // PAGE_SIZE, LAYER, slots % PAGE_SIZE]
    assert torch.equal(gather_rows(pool, LAYER, slots, fp8), expected)


@pytest.mark.parametrize("heads", [21, 64], ids=["few heads", "many heads"])
@pytest.mark.parametrize("programs", [1, 1000], ids=["one share", "many shares"])
@pytest.mark.parametrize("fp8", [Fp8Rows(272, 256, torch.float16), Fp8Rows(48, 32, torch.float32), None], ids=str)
@pytest.mark.parametrize("chosen", [False, True], ids=["all", "chosen"])
def test_attention(
    heads: int, programs: int, fp8: Fp8Rows | None, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens attend to chosen positions and to all, also where some shares have none, and in 16 bits."""
    tiling = (triton_chosen.MANY if heads == 64 else FEW)._replace(programs=programs)
    monkeypatch.setattr(triton_chosen, "choose_tiling", lambda q, many: tiling)
    form = fp8 or Fp8Rows(48, 32, torch.float32)
    case, rank, rotated = Case(dtype=form.dtype), form.quantized, form.width - form.quantized
    pool, numbers = stored_pool(form)
    if fp8 is None:
        pool = numbers[:, :, None, None].contiguous()
    wide, narrow = draw(case, 3, heads, rank, seed=1) * 0.1, draw(case, 3, heads, rotated, seed=2) * 0.1
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    lengths, firsts = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((1, 33, 160), (0, 20, 3)))
    positions = torch.arange(160, device=DEVICE).repeat(3, 1)
    if chosen:
        generator = torch.Generator().manual_seed(2)
        positions = torch.stack([torch.randperm(160, generator=generator).sort().values for _ in range(3)]).to(DEVICE)
    positions = positions.masked_fill(torch.arange(160, device=DEVICE) >= lengths[:, None], -1)
    if chosen:
        which = positions.int()
        found = attend_chosen(pool, LAYER, wide, narrow, which, (firsts, pages), 0.3, fp8)
    else:
        found = attend_seen(pool, LAYER, wide, narrow, SeenPages(lengths, firsts, pages), 160, 0.3, fp8)
    at = positions.clamp(min=0)
    slots = pages[firsts[:, None] + at // PAGE_SIZE].long(), at % PAGE_SIZE
    entries = numbers[slots[0], LAYER, slots[1]]
    queries = torch.cat((wide, narrow), 2).float()
    assert_close(found, torch_latent.attend_chosen(queries, entries.float(), positions, rank, 0.3))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "in graph buffers"])
@pytest.mark.parametrize("case", [Case(), Case(width=128, heads=64, dtype=torch.float16)], ids=["small", "DeepSeek's"])
def test_both_backends_of_index_keys_choose_alike(case: Case, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_index, "cut_tiles", lambda lengths: cut_tiles(lengths, 150))
    tokens, tables = lay_out(replace(case, new=1) if captured else case)
    rank, num_tokens, fp8 = case.width // 2, tokens.positions.size, Fp8Rows(case.width, case.width, case.dtype)
    pools = [stored_pool(fp8)[0] for _ in range(2)]
    reference = TorchIndexKernels(pools[0], rank, case.top_k, fp8)
    kernels = TritonIndexKernels(pools[1], rank, case.top_k, fp8)
    index, _ = draw_index(case, num_tokens)
    still, rotated = representable(torch.cat((index.still, index.rotated), 1)).split(rank, 1)
    index = index._replace(still=still, rotated=rotated)
    expected = reference.run(GroupPlan(reference.plan(tokens, tables), None), LAYER, index)
    choosers = Choosers.of(tokens, tables, case.top_k)
    if captured:
        limits = Limits.of_step(num_tokens + 1, 4, 1)
        own = kernels.buffers(limits, device_tables(tables, limits.num_tokens))
        own.begin_captured()
        own.plan(tokens, tables)
        padded = Index(*(torch.cat((x, x[:1])) for x in index))
        found = own.run(GroupPlan(own, None, captured=True), LAYER, padded)
        assert torch.equal(found[torch.from_numpy(choosers.tokens).to(DEVICE)], expected)
    else:
        found = kernels.run(GroupPlan(kernels.plan(tokens, tables), None), LAYER, Index(*map(Tensor.clone, index)))
        assert torch.equal(found, expected)
    assert torch.equal(*(pool.view(torch.uint8) for pool in pools))
    slots = np.arange(0, 90, 7, dtype=np.int32)
    for one, other in zip(reference.read_slots(LAYER, slots), kernels.read_slots(LAYER, slots), strict=True):
        assert torch.equal(one, other)


def test_several_scales_of_an_index_key_are_refused() -> None:
    fp8 = Fp8Rows(192, 192, torch.bfloat16)
    with pytest.raises(InvalidArgument, match="index_head_dim is 192; in 8 bits it must be at most 128"):
        TritonIndexKernels(empty_pool(fp8), 64, 5, fp8)


class Ragged:
    """FlashInfer's wrapper of expanded K and V, for sequences whose new tokens are their last."""

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, *_: int, sm_scale: float, **options: Any) -> None:
        self.queries, self.keys, self.scale = qo_indptr.tolist(), kv_indptr.tolist(), sm_scale

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for i in range(len(self.queries) - 1):
            its_q = q[self.queries[i] : self.queries[i + 1]].float()
            its_k, its_v = (x[self.keys[i] : self.keys[i + 1]].float() for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", its_q, its_k) * self.scale
            last = its_k.shape[0] - its_q.shape[0] + torch.arange(its_q.shape[0], device=q.device)[:, None]
            weights = scores.masked_fill(torch.arange(its_k.shape[0], device=q.device) > last, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, its_v))
        return torch.cat(outputs).to(q.dtype)


@pytest.fixture
def without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(kernels: PlannedWrappers[Latents], pool: Tensor) -> None:
        PageOperations.__init__(kernels, pool)
        kernels._pool, kernels._workspace, kernels._current, kernels._planned = pool, pool, None, Mock()

    monkeypatch.setattr(PlannedWrappers, "__init__", begin)
    wrappers = Mock(BatchPrefillWithRaggedKVCacheWrapper=lambda *_: Ragged())
    monkeypatch.setattr(flashinfer_latent, "load_flashinfer", lambda: wrappers)


def draw_latents(num_tokens: int, dtype: torch.dtype) -> Latents:
    case = Case(dtype=dtype)
    q = draw(case, num_tokens, HEADS, 128 + ROTATED) * 0.1
    weight = draw(case, HEADS, 256, RANK, seed=3) * RANK**-0.5
    rows = representable(draw(case, num_tokens, RANK, seed=1)), draw(case, num_tokens, ROTATED, seed=2)
    return Latents(q, *rows, UpProjections(weight, LATENT_HEADS))


@pytest.mark.usefixtures("without_flashinfer")
@pytest.mark.parametrize("way", ["expanded", "absorbed", "both", "in graph buffers"])
@pytest.mark.parametrize("top_k", [None, 20])
def test_both_backends_of_latents_attend_alike(top_k: int | None, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk after decodes, each expanded or absorbed; of layers that choose, longer sequences attend to what they
    are given."""
    captured = way == "in graph buffers"
    case = Case(dtype=torch.float16, new=1 if captured else 5)
    tokens, tables = lay_out(case)

    def cheaper(appends: np.ndarray, *_: Any) -> np.ndarray:
        return appends == 1 if way == "both" else np.full(appends.shape, way != "expanded")

    for module in (latent_fp8, torch_latent):
        monkeypatch.setattr(module, "absorbed_is_cheaper", cheaper)
    num_tokens, fp8 = tokens.positions.size, Fp8Rows(RANK + ROTATED, RANK, case.dtype)
    pools = [stored_pool(fp8)[0] for _ in range(2)]
    arguments = (0.07, RANK, LATENT_HEADS, top_k, fp8)
    reference, kernels = TorchLatentKernels(pools[0], *arguments), Fp8LatentKernels(pools[1], *arguments)
    x = draw_latents(num_tokens, case.dtype)
    choosers = Choosers.of(tokens, tables, top_k)
    if top_k is not None:
        rows = torch.arange(top_k, dtype=torch.int32, device=DEVICE).repeat(choosers.tokens.size, 1)
        x = x._replace(chosen=rows * 2 % 23)
    expected = reference.run(GroupPlan(reference.plan(tokens, tables), None), LAYER, x)
    if captured:
        limits = Limits.of_step(num_tokens + 1, HEADS, 1)
        own = kernels.buffers(limits, device_tables(tables, limits.num_tokens))
        own.begin_captured()
        own.plan(tokens, tables)
        more = [torch.cat((its, its[:1])) for its in x[:3]]
        chosen = None
        if top_k is not None and x.chosen is not None:  # in graph buffers all tokens choose
            chosen = torch.full((num_tokens + 1, top_k), -1, dtype=torch.int32, device=DEVICE)
            chosen[:, 0] = 0
            for token, length in enumerate(tokens.seq_lens.tolist()):
                chosen[token, :length] = torch.arange(min(length, top_k))
            chosen[torch.from_numpy(choosers.tokens).to(DEVICE)] = x.chosen
        found = own.run(GroupPlan(own, None, captured=True), LAYER, Latents(more[0], more[1], more[2], x.up, chosen))
        found = found[:num_tokens]
    else:
        copies = Latents(x.q.clone(), x.latents.clone(), x.keys.clone(), x.up, x.chosen)
        found = kernels.run(GroupPlan(kernels.plan(tokens, tables), None), LAYER, copies)
    assert_close(found, expected.double())
    assert torch.equal(*(pool.view(torch.uint8) for pool in pools))
    slots = np.arange(0, 90, 7, dtype=np.int32)
    for one, other in zip(reference.read_slots(LAYER, slots), kernels.read_slots(LAYER, slots), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("without_flashinfer")
def test_what_kernels_of_8_bits_can_do() -> None:
    fp8 = Fp8Rows(RANK + ROTATED, RANK, torch.bfloat16)
    can = Fp8LatentKernels(empty_pool(fp8), 0.1, RANK, LATENT_HEADS, None, fp8).capabilities
    assert not can.trees
    assert can.pushes
    assert can.step_graphs
    assert can.verify_graphs
    wide = Fp8Rows(RANK + ROTATED, RANK, torch.float32)
    with pytest.raises(InvalidArgument, match=r"dtype is torch\.float32; on a GPU it must be one of"):
        Fp8LatentKernels(empty_pool(wide), 0.1, RANK, LATENT_HEADS, None, wide)
