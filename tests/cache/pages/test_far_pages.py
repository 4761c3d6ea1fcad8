"""Kernels do the same with far pages as with near ones: on a GPU, else in Triton's interpreter."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.plan.tables import look_up_pages
from tests.cache.far_pages import far_pages
from tests.cache.kernels.test_triton_tree import BUSH, layout_of

pytest.importorskip("triton")

from tandem.cache.kernels.triton.append import AppendTargets, append
from tandem.cache.kernels.triton.decode import decode
from tandem.cache.kernels.triton.decode_plan import DecodePlan, schedule_splits
from tandem.cache.kernels.triton.gather import gather
from tandem.cache.kernels.triton.latent_append import append_latents
from tandem.cache.kernels.triton.latent_tree import attend_latent_trees
from tandem.cache.kernels.triton.tree import TreeTiles, attend_trees, lay_out_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, LAYERS, LAYER, PAGE_SIZE = 9, 2, 1, 4
ENTRIES, LATENTS = (2, 2, PAGE_SIZE, 16), (1, 1, PAGE_SIZE, 48)  # of a layer of a page
RANK = 32

Kernel = Callable[[Tensor, int], Tensor | None]
"""A kernel that takes a pool and the first of the pages that it works on."""


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.float16)


def slots_from(first: int) -> Tensor:
    return torch.tensor([7, 30, 12], dtype=torch.int32, device=DEVICE) + first * PAGE_SIZE


def gathers(pool: Tensor, first: int) -> Tensor:
    return gather(pool, LAYER, slots_from(first))


def appends(pool: Tensor, first: int) -> None:
    q, k, v = draw(3, 8, 16).split((4, 2, 2), 1)
    append(pool, LAYER, q, k, v, None, AppendTargets(slots_from(first), None), keep_k=False)


def appends_latents(pool: Tensor, first: int) -> None:
    latents, keys = draw(3, 48).split((RANK, 16), 1)
    targets = AppendTargets(slots_from(first), None)
    append_latents(pool, LAYER, draw(3, 2, 24), latents, keys, None, targets, keep=False)


def decodes(pool: Tensor, first: int) -> Tensor:
    q, k, v = draw(2, 8, 16).split((4, 2, 2), 1)
    pages = torch.tensor([8, 0, 5, 3, 1], dtype=torch.int32, device=DEVICE) + first
    slots = pages[[2, 4]] * PAGE_SIZE + torch.tensor([1, 3], dtype=torch.int32, device=DEVICE)
    indptr, last = (torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in ([0, 3, 5], [2, 4]))
    plan = DecodePlan.make(DeviceTables(slots, indptr, last, pages), 4, 2, 16)
    schedule_splits(plan, pool, Scoring(0.3))
    return decode(pool, LAYER, q, k, v, None, plan, Scoring(0.3), None, None)


def tree_of(first: int) -> tuple[int, TreeTiles]:
    """How many nodes, after no context."""
    tokens = layout_of(((0, BUSH, 8),))
    table = np.array([[4, 2, 7]], np.int32) + np.int32(first)
    _, arrays = lay_out_tiles(tokens, look_up_pages(table, np.zeros(1, np.int64), tokens, PAGE_SIZE), PAGE_SIZE, None)
    return tokens.positions.size, TreeTiles(*(torch.from_numpy(array).to(DEVICE) for array in arrays))


def attends_to_trees(pool: Tensor, first: int) -> Tensor:
    count, tiles = tree_of(first)
    q, lse = draw(count, 4, 16), torch.zeros(count, 4, device=DEVICE)
    return attend_trees(pool, LAYER, q, torch.zeros_like(q), lse, tiles, Scoring(0.3), None)


def attends_to_latent_trees(pool: Tensor, first: int) -> Tensor:
    count, tiles = tree_of(first)
    q, rotated = draw(count, 2, 48).split((RANK, 16), 2)
    context, lse = torch.zeros(count, 2, RANK, device=DEVICE, dtype=q.dtype), torch.zeros(count, 2, device=DEVICE)
    return attend_latent_trees(pool, LAYER, q, rotated, context, lse, tiles, 0.3)


@pytest.mark.parametrize(
    ("kernel", "entries"),
    [
        (gathers, ENTRIES),
        (appends, ENTRIES),
        (appends_latents, LATENTS),
        (decodes, ENTRIES),
        (attends_to_trees, ENTRIES),
        (attends_to_latent_trees, LATENTS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_far_pages(kernel: Kernel, entries: tuple[int, ...]) -> None:
    near = draw(PAGES, LAYERS, *entries)
    far, first = far_pages(near)
    expected, actual = kernel(near, 0), kernel(far, first)
    if expected is not None and actual is not None:
        assert torch.equal(actual, expected)
    assert torch.equal(far[first:], near)
