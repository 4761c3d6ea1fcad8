"""The kernel of trees over latents against float64 over what each node sees: on a GPU, else in Triton's interpreter."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.plan.tables import look_up_pages
from tests.cache.kernels.test_triton_tree import BUSH, SEVERAL_TILES, Trees, layout_of, path
from tests.support.tolerances import assert_close

pytest.importorskip("triton")

from tandem.cache.kernels.triton.latent_tree import attend_latent_trees
from tandem.cache.kernels.triton.tree import TreeTiles, lay_out_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, LAYER = 2, 1
SCALE = 0.2


@dataclass(frozen=True)
class Case:
    heads: int = 4
    rank: int = 32
    rotated: int = 16
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    trees: Trees = ((5, BUSH, 8), (0, BUSH, 3), (8, [-1, -1], 1))


CASES = {
    "small": Case(),
    "odd heads, page of 1": Case(heads=5, page_size=1),
    "several tiles": Case(heads=1, trees=SEVERAL_TILES),
    "DeepSeek's": Case(heads=16, rank=512, rotated=64, page_size=16, dtype=torch.float16),
}


def weigh(q: Tensor, entries: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Weighted latents [heads, rank] and log-sum-exp [heads] of q [heads, width] over entries [n, width]."""
    scores = q @ entries.T * SCALE
    return scores.softmax(-1) @ entries[:, :rank], scores.logsumexp(-1)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_trees(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, width = layout_of(case.trees), case.rank + case.rotated
    pages_each = int(tokens.seq_lens.max()) // case.page_size + 1
    table = torch.randperm(len(case.trees) * pages_each, generator=generator).numpy().astype(np.int32)
    table = table.reshape(-1, pages_each)
    tables = look_up_pages(table, np.arange(len(case.trees)), tokens, case.page_size)
    pool = torch.full((table.size, LAYERS, 1, 1, case.page_size, width), torch.nan, dtype=case.dtype)
    count = tokens.positions.size
    rotated = torch.randn(count, case.heads, width, generator=generator).to(case.dtype)[:, :, case.rank :]
    # As absorbing leaves it, head after head; FlashInfer's output then is, too.
    q = torch.randn(case.heads, count, case.rank, generator=generator).to(case.dtype).transpose(0, 1)
    context, lse = torch.full_like(q, torch.nan), torch.full((count, case.heads), torch.nan)
    expected = torch.empty(q.shape, dtype=torch.float64)
    token = 0
    for index, (length, parents, new) in enumerate(case.trees):
        entries = torch.randn(length + len(parents), width, generator=generator).to(case.dtype)
        for position, entry in enumerate(entries):
            pool[table[index, position // case.page_size], LAYER, 0, 0, position % case.page_size] = entry
        exact = entries.double()
        for node in range(len(parents) - new, len(parents)):
            own = torch.cat((q[token], rotated[token]), 1).double()
            if length:
                before, of_before = weigh(own, exact[:length], case.rank)
                context[token], lse[token] = before.to(case.dtype), of_before / math.log(2)
            seen = [*range(length), *(length + one for one in path(parents, node))]
            expected[token], _ = weigh(own, exact[seen], case.rank)
            token += 1
    _, arrays = lay_out_tiles(tokens, tables, case.page_size, None)
    tiles = TreeTiles(*(torch.from_numpy(array).to(DEVICE) for array in arrays))
    q, rotated, context, lse = (tensor.to(DEVICE) for tensor in (q, rotated, context, lse))
    output = attend_latent_trees(pool.to(DEVICE), LAYER, q, rotated, context, lse, tiles, SCALE)
    assert_close(output.cpu(), expected)
