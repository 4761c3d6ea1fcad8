"""Kernels of index keys against torch's, which are their reference: on a GPU, else in Triton's interpreter."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tandem.cache.kernels.base import DeviceTables, GroupPlan, Index, Limits
from tandem.cache.kernels.entry_tiling import FEW
from tandem.cache.kernels.index_keys import Choosers
from tandem.cache.kernels.torch import index as torch_index
from tandem.cache.kernels.torch import latent as torch_latent
from tandem.cache.kernels.torch.index import TorchIndexKernels
from tandem.cache.kernels.triton import chosen as triton_chosen
from tandem.cache.kernels.triton import index as triton_index
from tandem.cache.kernels.triton import top_k, top_k_chunks
from tandem.cache.kernels.triton.chosen import attend_chosen
from tandem.cache.kernels.triton.index import TritonIndexKernels, cut_tiles
from tandem.cache.kernels.triton.index_scores import SeenPages, score_positions
from tandem.cache.kernels.triton.top_k import choose_top
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout, lay_out_tokens, look_up_pages
from tests.support.tolerances import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, LAYER, PAGES = 2, 1, 48


@dataclass(frozen=True)
class Case:
    """lengths: of the sequences. The last has `new` new tokens, each other one."""

    lengths: tuple[int, ...] = (70, 1, 33, 24)
    new: int = 5
    heads: int = 8
    width: int = 32
    page_size: int = 8
    top_k: int = 20
    dtype: torch.dtype = torch.float32


CASES = {
    "small": Case(),
    "no powers of two": Case(heads=5, width=20, page_size=3, top_k=7),
    "DeepSeek's": Case(lengths=(80, 40), new=2, heads=64, width=128, page_size=16, top_k=32, dtype=torch.float16),
}


def draw(case: Case, *shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype or case.dtype)


def lay_out(case: Case) -> tuple[TokenLayout, PageTables]:
    lengths = np.array(case.lengths)
    appends = np.array([1] * (lengths.size - 1) + [case.new])
    tokens = lay_out_tokens(lengths - appends, appends)
    pages = np.random.default_rng(0).permutation(PAGES).astype(np.int32)
    counts = -(-lengths // case.page_size)
    table = np.zeros((lengths.size, counts.max()), np.int32)
    for row, count, end in zip(table, counts, np.cumsum(counts), strict=True):
        row[:count] = pages[end - count : end]
    return tokens, look_up_pages(table, np.arange(lengths.size), tokens, case.page_size)


def draw_index(case: Case, num_tokens: int) -> tuple[Index, Rotation]:
    rotated = case.width // 2
    q, keys = draw(case, num_tokens, case.heads, case.width), draw(case, num_tokens, case.width, seed=1)
    still, turned = keys.split((case.width - rotated, rotated), 1)
    weights = draw(case, num_tokens, case.heads, seed=2, dtype=torch.float32)
    angles = draw(case, num_tokens, rotated // 2, seed=3, dtype=torch.float32)
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    return Index(q, still.clone(), turned.clone(), weights), Rotation(torch.stack((cos, sin), 1).to(case.dtype))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_scores(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are of single tokens and of a chunk's tokens. Each token of a chunk sees one position more."""
    monkeypatch.setattr("tandem.cache.kernels.triton.index_scores.PROGRAMS", 24)  # some tiles in a program
    tokens, tables = lay_out(case)
    pool = draw(case, PAGES, LAYERS, 1, 1, case.page_size, case.width)
    choosers = Choosers.of(tokens, tables, 0)
    count, longest = choosers.tokens.size, int(choosers.lengths.max())
    q, weights = draw(case, count, case.heads + 1, case.width, seed=4)[:, 1:], draw(case, count, case.heads, seed=5)
    arrays = (choosers.lengths, choosers.firsts, tables.kv_indices)
    seen = SeenPages(*(torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in arrays))
    scores = score_positions(pool, LAYER, q, weights.float(), seen, longest + 3)
    assert scores.shape == (count, longest + 3)
    for token, (length, first) in enumerate(zip(choosers.lengths.tolist(), choosers.firsts.tolist(), strict=True)):
        positions = np.arange(length)
        pages = tables.kv_indices[first + positions // case.page_size]
        keys = pool[pages, LAYER, 0, 0, positions % case.page_size]
        expected = torch_index.score(
            q[token, None], weights[token, None].float(), keys, torch.zeros(1, length, device=DEVICE)
        )
        torch.testing.assert_close(scores[token, None, :length], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("programs", [1, 18, 1000], ids=["one program", "chunks of blocks", "a block each"])
@pytest.mark.parametrize("kind", ["unlike", "nearly alike", "few values", "one value", "zeros of both signs"])
def test_choice_is_the_references(kind: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties go to the first, and -0 is 0; rows of no position, fewer than are chosen, as many, one more and many more.
    After a row's positions there may be anything."""
    for module in ("top_k", "top_k_chunks"):
        monkeypatch.setattr(f"tandem.cache.kernels.triton.{module}.SCORES_AT_ONCE", 32)
    monkeypatch.setattr("tandem.cache.kernels.triton.top_k.PROGRAMS", programs)
    scores = torch.randn(6, 150, generator=torch.Generator().manual_seed(0)) * 100
    if kind == "nearly alike":
        scores = 1 + scores * 1e-7
    if kind == "few values":
        scores = (scores / 60).round()
    if kind == "one value":
        scores.fill_(-3.0)
    if kind == "zeros of both signs":
        scores = scores.sign() * 0.0
    scores = scores.to(DEVICE)
    lengths = torch.tensor([0, 19, 20, 21, 100, 150], dtype=torch.int32, device=DEVICE)
    masked = scores.masked_fill(torch.arange(150, device=DEVICE) >= lengths[:, None], -torch.inf)
    scores.masked_fill_(masked == -torch.inf, torch.nan)
    assert torch.equal(choose_top(scores, lengths, 20), torch_index.choose(masked, 20))


def test_one_long_row_is_chosen_from_by_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(top_k, "choose_in_chunks", lambda *x: called.append(x) or top_k_chunks.choose_in_chunks(*x))
    scores = torch.randn(1, 7001, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    lengths = torch.tensor([6999], dtype=torch.int32, device=DEVICE)
    scores[0, 3::5] = scores[0, :6999].topk(500).values[-1]  # ties around the last one
    expected = torch_index.choose(scores[:, :6999], 512)
    assert torch.equal(choose_top(scores, lengths, 512), expected)
    assert [one[3] for one in called] == [4]


def test_the_reference_chooses_the_first_of_the_best() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0], [5.0, 4.0, -torch.inf, -torch.inf, -torch.inf]])
    assert torch_index.choose(scores, 3).tolist() == [[1, 2, 3], [0, 1, -1]]
    assert torch_index.choose(scores, 7).tolist() == [[0, 1, 2, 3, 4, -1, -1], [0, 1, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize("heads", [21, 64], ids=["few heads", "many heads"])
@pytest.mark.parametrize("programs", [1, 1000], ids=["one share", "many shares"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_to_what_is_chosen(
    heads: int, programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some shares have nothing, and heads that do not fill a program."""
    tiling = (triton_chosen.MANY if heads == 64 else FEW)._replace(programs=programs)
    monkeypatch.setattr(triton_chosen, "choose_tiling", lambda q, many: tiling)
    case, rank, rotated, top_k = Case(dtype=dtype), 32, 16, 70
    pool = draw(case, PAGES, LAYERS, 1, 1, case.page_size, rank + rotated)
    q = draw(case, 3, heads, rank + rotated, seed=1)
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)
    firsts = torch.tensor([0, 20, 3], dtype=torch.int32, device=DEVICE)
    generator, chosen = torch.Generator().manual_seed(2), torch.full((3, top_k), -1, dtype=torch.int32, device=DEVICE)
    for row, count in zip(chosen, (1, 33, 70), strict=True):
        row[:count] = torch.randperm(160, generator=generator)[:count].sort().values
    wide, narrow = q.split((rank, rotated), 2)
    found = attend_chosen(pool, LAYER, wide, narrow, chosen, (firsts, pages), 0.3)
    positions = chosen.clamp(min=0).long()
    slots = pages[firsts[:, None] + positions // case.page_size], positions % case.page_size
    entries = pool[slots[0].long(), LAYER, 0, 0, slots[1]]
    assert_close(found, torch_latent.attend_chosen(q.float(), entries.float(), chosen, rank, 0.3))


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "in graph buffers"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_both_backends_store_and_choose_alike(case: Case, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of few tokens are in memory at once. In graph buffers each sequence has one token, there is a row of
    padding, and all choose."""
    monkeypatch.setattr(triton_index, "cut_tiles", lambda lengths: cut_tiles(lengths, 150))
    tokens, tables = lay_out(Case(**{**vars(case), "new": 1}) if captured else case)
    rank, num_tokens = case.width // 2, tokens.positions.size
    pools = [draw(case, PAGES, LAYERS, 1, 1, case.page_size, case.width) for _ in range(2)]
    reference = TorchIndexKernels(pools[0], rank, case.top_k)
    kernels = TritonIndexKernels(pools[1], rank, case.top_k)
    index, rotation = draw_index(case, num_tokens)
    expected = reference.run(GroupPlan(reference.plan(tokens, tables), rotation), LAYER, index)
    choosers = Choosers.of(tokens, tables, case.top_k)
    if not captured:
        found = kernels.run(GroupPlan(kernels.plan(tokens, tables), rotation), LAYER, Index(*map(Tensor.clone, index)))
        assert torch.equal(found, expected)
    else:
        padded = Index(*(torch.cat((x, x[:1])) for x in index))
        turned = Rotation(torch.cat((rotation.table, rotation.table[:1])))
        limits = Limits.of_step(num_tokens + 1, 4, 1)
        own = kernels.buffers(limits, device_tables(tables, limits.num_tokens))
        own.begin_captured()
        own.plan(tokens, tables)
        found = own.run(GroupPlan(own, turned, captured=True), LAYER, padded)
        assert torch.equal(found[torch.from_numpy(choosers.tokens).to(DEVICE)], expected)
        for token in np.flatnonzero(tokens.seq_lens <= case.top_k):
            positions = range(tokens.seq_lens[token])
            assert found[token].tolist() == [*positions, *[-1] * (case.top_k - len(positions))]
    assert_close(pools[1], pools[0].double())


def device_tables(tables: PageTables, rows: int) -> DeviceTables:
    """Makes tables with one row of padding, and room for more pages."""

    def array(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    indptr = tables.kv_indptr.tolist()
    indices = [*tables.kv_indices.tolist(), 0]
    return DeviceTables(
        array([*tables.slot_mapping.tolist(), -1]),
        array([*indptr, indptr[-1] + 1]),
        array([*tables.kv_last_page_len.tolist(), 1]),
        array(indices + [0] * (rows * 40 - len(indices))),
    )


def test_scores_in_memory_together_are_bounded() -> None:
    assert cut_tiles(np.array([], np.int32), 10) == []
    assert cut_tiles(np.array([50], np.int32), 10) == [(0, 1, 50)]
    assert cut_tiles(np.array([4, 5, 3, 3, 3, 9, 1], np.int32), 10) == [(0, 2, 5), (2, 5, 3), (5, 6, 9), (6, 7, 1)]
