"""The tree kernel against attention in float64 over what each node may see: on a GPU, else in Triton's interpreter."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.spans import span_of
from tandem.cache.plan.tables import TokenLayout, lay_out_tokens, look_up_pages
from tandem.cache.plan.token_tree import lay_out_trees
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.triton.tree import TreeTiles, attend_trees, lay_out_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, LAYER = 2, 1
BUSH = [-1, 0, 0, 1, 1, 2, -1, 6]
CHAIN = list(range(-1, 69))
SEVERAL_TILES = ((3, CHAIN, 70), (0, [-1] * 70, 20), (1, [*CHAIN, -1, 70], 2))


Trees = tuple[tuple[int, list[int], int], ...]
"""For each sequence its context's length, the nodes' parents, and how many nodes are new."""


@dataclass(frozen=True)
class Case:
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False
    dtype: torch.dtype = torch.float32
    window: int | None = None
    trees: Trees = ((5, BUSH, 8), (0, BUSH, 3), (8, [-1, -1], 1))


CASES = {
    "GQA": Case(),
    "MQA": Case(q_heads=12, kv_heads=1),
    "group of 3": Case(q_heads=6),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "sinks and softcap": Case(sinks=True, softcap=1.5),
    "float16": Case(head_dim=64, dtype=torch.float16, sinks=True),
    "8 bits": Case(head_dim=64, dtype=torch.float16, fp8=True),
    "page of 1": Case(page_size=1),
    "several tiles": Case(trees=SEVERAL_TILES),
    "window": Case(window=4, trees=((30, BUSH, 8), (17, BUSH, 3), (2, BUSH, 8), (0, BUSH, 8))),
    "window that all nodes see much of": Case(
        window=20, sinks=True, trees=((70, BUSH, 8), (33, BUSH, 2), (19, BUSH, 8))
    ),
    "window of 1": Case(window=1, page_size=1, trees=((5, BUSH, 8), (0, [-1], 1))),
    "window, several tiles": Case(window=40, trees=SEVERAL_TILES),
    "window, 8 bits": Case(head_dim=64, dtype=torch.float16, fp8=True, window=9, trees=((40, BUSH, 8), (3, BUSH, 4))),
}


def layout_of(trees: Trees) -> TokenLayout:
    contexts = np.array([context + len(parents) - new for context, parents, new in trees])
    tokens = lay_out_tokens(contexts, np.array([new for _, _, new in trees]))
    parents = [np.array(of) for _, of, _ in trees]
    return replace(tokens, trees=lay_out_trees(np.arange(len(trees)), parents, tokens.qo_indptr))


def path(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(parents, parents[node]), node]


def scores_of(case: Case, q: Tensor, keys: Tensor) -> Tensor:
    """[q_heads, n] of q [q_heads, D] with keys [n, kv_heads, D]."""
    scores = torch.einsum("hd,nhd->hn", q, keys.repeat_interleave(case.q_heads // case.kv_heads, 1)) * 0.3
    return scores if case.softcap is None else case.softcap * torch.tanh(scores / case.softcap)


def weigh(case: Case, scores: Tensor, values: Tensor) -> Tensor:
    weights = scores.softmax(-1)[:, : values.shape[0]]
    return torch.einsum("hn,nhd->hd", weights, values.repeat_interleave(case.q_heads // case.kv_heads, 1))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_trees(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = layout_of(case.trees)
    pages_each = int(tokens.seq_lens.max()) // case.page_size + 1
    table = torch.randperm(len(case.trees) * pages_each, generator=generator).numpy().astype(np.int32)
    bases = np.array([length for length, _, _ in case.trees])
    begins = span_of(case.window).first_needed(bases) // case.page_size  # what no root sees is gone
    tables = look_up_pages(table.reshape(-1, pages_each), np.arange(begins.size), tokens, case.page_size, begins)
    contexts, arrays = lay_out_tiles(tokens, tables, case.page_size, case.window)
    assert contexts is not None
    pool = torch.full(
        (table.size, LAYERS, 2, case.kv_heads, case.page_size, case.head_dim), torch.nan, dtype=case.dtype
    )
    scales = torch.rand(2, case.kv_heads, generator=generator) + 0.5
    count = tokens.positions.size
    q = torch.randn(count, case.q_heads, case.head_dim, generator=generator).to(case.dtype)
    sinks = torch.randn(case.q_heads, generator=generator) * 2 if case.sinks else None
    context, lse = torch.full_like(q, torch.nan), torch.full((count, case.q_heads), torch.nan)
    expected = torch.empty(q.shape, dtype=torch.float64)
    token = 0
    for index, (length, parents, new) in enumerate(case.trees):
        total, common = length + len(parents), int(begins[index] * case.page_size + contexts.commons[index])
        kv = torch.randn(2, total, case.kv_heads, case.head_dim, generator=generator).to(case.dtype)
        if case.fp8:
            kv = kv.to(torch.float8_e4m3fn).to(case.dtype)
        pages = table.reshape(-1, pages_each)[index]
        for position in range(total):
            page, offset = pages[position // case.page_size], position % case.page_size
            if position >= begins[index] * case.page_size:
                pool[page, LAYER, :, :, offset] = kv[:, position]
        keys, values = kv.double() * (scales[:, None, :, None] if case.fp8 else 1.0)
        for node in range(len(parents) - new, len(parents)):
            own = q[token].double()
            if common < length:
                scores = scores_of(case, own, keys[common:length])
                context[token] = weigh(case, scores, values[common:length]).to(case.dtype)
                lse[token] = scores.logsumexp(-1) / math.log(2)
            seen = [*range(length), *(length + one for one in path(parents, node))]
            seen = seen if case.window is None else seen[-case.window :]
            scores = scores_of(case, own, keys[seen])
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), -1)
            expected[token] = weigh(case, scores, values[seen])
            token += 1
    tiles = TreeTiles(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
    output = attend_trees(
        (pool.to(torch.float8_e4m3fn) if case.fp8 else pool).to(DEVICE),
        LAYER,
        q.to(DEVICE),
        context.to(DEVICE),
        lse.to(DEVICE),
        tiles,
        Scoring(0.3, case.window, case.softcap),
        None if sinks is None else sinks.to(DEVICE),
        scales.to(DEVICE) if case.fp8 else None,
    )
    assert_close(output.cpu(), expected)
