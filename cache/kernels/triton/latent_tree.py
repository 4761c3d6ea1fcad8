"""Attention of token trees over latents on a GPU, absorbed: as tree.py, over what plan/latent.py describes."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.tree import (
    NODES_PER_TILE,
    TILE_FIELDS,
    TreeTiles,
    add_keys,
    begin_softmax,
    end_softmax,
    read_tile,
    what_is_seen,
)
from tandem.cache.plan.token_tree import MASK_WORDS

HEADS_PER_TILE = 2  # all heads read the same entries; the sums of a row are as wide as a latent
KEYS_PER_TILE = 32


def attend_latent_trees(
    pool: Tensor, layer: int, q: Tensor, rotated: Tensor, context: Tensor, lse: Tensor, tiles: TreeTiles, scale: float
) -> Tensor:
    """Weighted sums of latents of n packed nodes. They are written over `context`: the sums over the positions before
    their trees.

    pool: [num_pages, layers, 1, 1, page_size, rank + rotated], contiguous; both parts are powers of two of at least 16.
    q [n, num_heads, rank], absorbed, rotated [n, num_heads, rotated] and context [n, num_heads, rank]: rows of any
    strides. lse: float32 [n, num_heads], contiguous, of base 2, of context; both are ignored for trees with nothing
    before.
    """
    page_size, width = pool.shape[4:]
    num_heads, rank = q.shape[1], q.shape[2]
    kernel: Any = _attend_latent_trees[(tiles.tiles.shape[0] // TILE_FIELDS, cdiv(num_heads, HEADS_PER_TILE))]
    kernel(
        *(pool, q, rotated, context, lse, tiles.tiles, tiles.slots, tiles.masks, tiles.edges),
        *(pool.stride(0), layer * pool.stride(1)),
        *(stride for rows in (q, rotated, context) for stride in rows.stride()[:2]),
        *(scale, num_heads),
        *(HEADS_PER_TILE, page_size, rank, width - rank, NODES_PER_TILE, KEYS_PER_TILE, TILE_FIELDS, MASK_WORDS),
        num_warps=8,
        num_stages=2,
        **launch_options(pool.device),
    )
    return context


@triton.jit
def _attend_latent_trees(
    pool, q, rotated, output, lse, tiles, slots, masks, edges,
    page_elements, layer_elements, q_token, q_head, rotated_token, rotated_head, output_token, output_head,
    scale, num_heads,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr,
    NODES: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one tile of nodes and HEADS heads; scores and log-sum-exp are of base 2."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first, count, first_slot, num_keys, num_before, has_context = read_tile(tiles, FIELDS)  # pyright: ignore[reportGeneralTypeIssues]
    row = tl.arange(0, NODES * HEADS)
    node, head = row // HEADS, (tl.program_id(1) * HEADS + row % HEADS).to(tl.int64)
    there = (node < count) & (head < num_heads)
    column, narrow = tl.arange(0, RANK), tl.arange(0, ROTATED)
    q_at = q + (first + node)[:, None] * q_token + head[:, None] * q_head + column[None, :]
    queries = tl.load(q_at, mask=there[:, None], other=0.0)
    rotated_at = rotated + (first + node)[:, None] * rotated_token + head[:, None] * rotated_head + narrow[None, :]
    rotated_queries = tl.load(rotated_at, mask=there[:, None], other=0.0)
    output += (first + node)[:, None] * output_token + head[:, None] * output_head + column[None, :]
    lse += (first + node) * num_heads + head
    top, total, weighted = begin_softmax(lse, output, there & (node < count * has_context))
    for begin in range(0, num_keys, KEYS):
        key = begin + tl.arange(0, KEYS)
        inside = key < num_keys
        slot = tl.load(slots + first_slot + key, mask=inside, other=0)
        entries = (
            pool + (slot // PAGE_SIZE).to(tl.int64) * page_elements
            + layer_elements + (slot % PAGE_SIZE) * (RANK + ROTATED)
        )  # fmt: skip
        latents = tl.load(entries[:, None] + column[None, :], mask=inside[:, None], other=0.0)
        keys = tl.load(entries[:, None] + RANK + narrow[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rotated_queries, tl.trans(keys), scores, input_precision="ieee") * scale
        seen = what_is_seen(masks, edges, first + node, there, key, inside, num_before, WORDS)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        top, total, weighted = add_keys(top, total, weighted, scores, latents)
    end_softmax(output, total, weighted, there)
