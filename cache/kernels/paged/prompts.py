"""Attention of any number of new tokens to the pages of their sequences, in a Triton kernel.

FlashAttention (Dao, 2023) over pages, for heads that FlashInfer has no kernels for. A program has some tokens of one
sequence with the query heads of one KV head. It goes through all that they see: keys are not shared out over programs,
so a few tokens after a long context take as long as one program needs for it.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.tree import add_keys, add_sink, end_softmax, load_entries
from tandem.cache.plan.arrays import Int32Array, IntArray, ragged_range

TOKENS, MOST_HEADS = 16, 4  # of a program: tokens, and query heads of a KV head
FIELDS = 6  # of a tile
KEYS, WARPS, STAGES = 32, 8, 2  # keys at once: of 16 bits and heads of 512, K and V of two stages take 128 KiB


def most_tiles(num_tokens: int, num_sequences: int) -> int:
    """The most tiles of a forward of up to so many tokens and sequences."""
    return num_tokens // TOKENS + num_sequences


def lay_out_tiles(
    firsts: IntArray,
    counts: IntArray,
    pages: IntArray,
    ends: IntArray,
    *,
    causal: bool = True,
    begins: IntArray | None = None,
    window: int | None = None,
) -> Int32Array:
    """int32 [tiles, FIELDS], longest first: first token, number of tokens, first page, the first token's position, and
    the positions from which on and up to which the tile looks at keys.

    Of each sequence: its first token among the packed ones, how many it has, where its pages begin in kv_indices, and
    how many positions it has there, the new ones included, which come last. causal: tokens see nothing after their own
    position, and nothing before their window. begins: positions before these nobody sees.
    """
    tiles = -(-counts // TOKENS)
    owners = np.repeat(np.arange(counts.size), tiles)
    steps = ragged_range(np.zeros_like(tiles), tiles) * TOKENS
    sizes = np.minimum(counts[owners] - steps, TOKENS)
    positions = (ends - counts)[owners] + steps
    last = positions + sizes if causal else ends[owners]
    first = np.zeros_like(positions) if begins is None else begins[owners]
    if window is not None:
        first = np.maximum(first, positions - window + 1)
    if not causal:
        positions = last  # each key is before it
    laid = np.stack((firsts[owners] + steps, sizes, pages[owners], positions, first, last), 1)
    return laid[np.argsort(first - last, kind="stable")].astype(np.int32)


def attend_tiles(
    pool: Tensor,
    layer: int,
    q: Tensor,
    tiles: Tensor,
    kv_indices: Tensor,
    scoring: Scoring,
    sinks: Tensor | None = None,
    fp8_scales: Tensor | None = None,
    *,
    with_lse: bool = False,
    padded: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """o [T, num_q_heads, head_dim] of the tokens that tiles have, and with_lse the log-sum-exps of their scores, of
    base 2, float32 [T, num_q_heads]. padded: rows of other tokens are zeros; else they mean nothing.

    pool: [num_pages, layers, 2, num_kv_heads, page_size, head_dim], contiguous; head_dim is a power of two of at least
    16. q: [T, num_q_heads, head_dim]. tiles: of lay_out_tiles(), on the device; one of zeros computes nothing.
    kv_indices: int32. scoring: its window, too. sinks: [num_q_heads]. fp8_scales: of a float8_e4m3fn pool, float32
    [2, num_kv_heads], by which its entries are multiplied.
    """
    _, _, _, num_kv_heads, page_size, head_dim = pool.shape
    q = q.contiguous()
    output = torch.zeros_like(q) if padded else torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if with_lse else None
    group = q.shape[1] // num_kv_heads
    heads = min(next_power_of_2(group), MOST_HEADS)
    kernel: Any = _attend_tiles[(tiles.shape[0], num_kv_heads * cdiv(group, heads))]
    kernel(
        *(pool, q, output, lse, sinks, fp8_scales, tiles, kv_indices),
        *(pool.stride(0), layer * pool.stride(1), scoring.scale, scoring.softcap or 0.0),
        *(num_kv_heads, group, heads, TOKENS, page_size, head_dim, KEYS, FIELDS, scoring.window or 0),
        *(scoring.softcap is not None, sinks is not None, with_lse, fp8_scales is not None),
        num_warps=WARPS,
        num_stages=STAGES,
        **launch_options(pool.device),
    )
    return output, lse


@triton.jit
def _attend_tiles(
    pool, q, output, lse, sinks, fp8_scales, tiles, kv_indices,
    page_elements, layer_elements, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, FIELDS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, LSE: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one tile of tokens and up to HEADS q heads of one KV head; scores are of base 2."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tiles + tl.program_id(0) * FIELDS
    first, count, pages = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    position, begin, end = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    kv_head, part = tl.program_id(1) % KV_HEADS, tl.program_id(1) // KV_HEADS
    row, column = tl.arange(0, TOKENS * HEADS), tl.arange(0, HEAD_DIM)
    token, in_group = row // HEADS, part * HEADS + row % HEADS
    there = (token < count) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    q_row = (first + token) * (KV_HEADS * GROUP) + head
    elements = q_row[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q + elements, mask=there[:, None], other=0.0)
    top = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * HEADS,), tl.float32)
    weighted = tl.zeros((TOKENS * HEADS, HEAD_DIM), tl.float32)
    if HAS_SINKS:
        top, total, weighted = add_sink(top, total, weighted, tl.load(sinks + head, mask=there, other=0.0))
    k_scale = fp8_scales + kv_head if FP8 else None
    v_scale = fp8_scales + KV_HEADS + kv_head if FP8 else None
    own = (position + token)[:, None]
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        page = tl.load(kv_indices + pages + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        lines = (
            pool + page * page_elements + layer_elements
            + kv_head * (PAGE_SIZE * HEAD_DIM) + (key % PAGE_SIZE) * HEAD_DIM
        )  # fmt: skip
        keys = load_entries(lines[:, None] + column[None, :], inside[:, None], k_scale, queries.dtype, FP8)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        seen = inside[None, :] & (key[None, :] <= own)
        if WINDOW > 0:
            seen &= key[None, :] > own - WINDOW
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        lines += KV_HEADS * PAGE_SIZE * HEAD_DIM  # V
        values = load_entries(lines[:, None] + column[None, :], inside[:, None], v_scale, queries.dtype, FP8)
        top, total, weighted = add_keys(top, total, weighted, scores, values)
    total = tl.where(total > 0.0, total, 1.0)  # of no key: −∞ and 0
    if LSE:
        tl.store(lse + q_row, top + tl.log2(total), mask=there)
    end_softmax(output + elements, total, weighted, there)
