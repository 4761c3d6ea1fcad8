"""Absorbed attention to positions of a pool of latents, those that a token has chosen or all that it sees: Triton
kernels, which compute what attend_chosen() of torch/latent.py does.

Of few tokens several programs share what each attends to (flash-decoding), and a second kernel merges what was found.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.entry_tiling import EntryTiling, choose_tiling
from tandem.cache.kernels.sizes import cdiv
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.fp8 import load_quantized
from tandem.cache.kernels.triton.index_scores import SeenPages
from tandem.cache.kernels.triton.tree import add_keys
from tandem.cache.plan.kv_scales import Fp8Rows

MANY = EntryTiling(heads=64, entries=64, warps=8, stages=3, programs=132)
FP8_WARPS = 8  # fewer have not the registers to dequantize, and spill
HEADS_PER_MERGE = 4


def attend_chosen(
    pool: Tensor,
    layer: int,
    q: Tensor,
    rotated: Tensor,
    chosen: Tensor,
    pages: tuple[Tensor, Tensor],
    scale: float,
    fp8: Fp8Rows | None = None,
) -> Tensor:
    """Returns weighted sums of latents, [n, num_heads, rank], over the positions that each of n tokens has chosen.

    pool: [num_pages, layers, 1, 1, page_size, rank + rotated], contiguous; both parts are powers of two of at least 16.
    fp8: the form of latents of q's dtype in a pool of 8 bits. q [n, num_heads, rank], absorbed, and rotated [n,
    num_heads, rotated]: rows of any strides. chosen: int32 [n, k], contiguous: the positions of each row, at least one,
    then -1. pages: firsts int32 [n] and kv_indices int32, see SeenPages.
    """
    return _attend(pool, layer, q, rotated, chosen, pages, chosen.shape[1], scale, fp8, chosen=True)


def attend_seen(
    pool: Tensor,
    layer: int,
    q: Tensor,
    rotated: Tensor,
    seen: SeenPages,
    longest: int,
    scale: float,
    fp8: Fp8Rows | None = None,
) -> Tensor:
    """Attends like attend_chosen(), to all positions that each token sees, at least one. longest: about the largest
    number of positions, from which the number of programs follows."""
    pages = seen.firsts, seen.kv_indices
    return _attend(pool, layer, q, rotated, seen.lengths, pages, longest, scale, fp8, chosen=False)


def _attend(
    pool: Tensor,
    layer: int,
    q: Tensor,
    rotated: Tensor,
    which: Tensor,
    pages: tuple[Tensor, Tensor],
    most: int,
    scale: float,
    fp8: Fp8Rows | None,
    *,
    chosen: bool,
) -> Tensor:
    """which: the chosen positions, or the numbers of positions seen. most: the most positions of a token."""
    num_tokens, num_heads, rank = q.shape
    tiling = choose_tiling(q, MANY)
    if fp8 is not None:
        tiling = tiling._replace(warps=FP8_WARPS)
    parts, tiles = cdiv(num_heads, tiling.heads), cdiv(most, tiling.entries)
    tiles_each = cdiv(tiles, min(tiles, max(1, tiling.programs // (num_tokens * parts))))
    shares = cdiv(tiles, tiles_each)
    output = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=pool.device)
    found, sums = output, output
    if shares > 1:
        found = torch.empty((num_tokens, shares, num_heads, rank), dtype=torch.float32, device=pool.device)
        sums = torch.empty((2, num_tokens, shares, num_heads), dtype=torch.float32, device=pool.device)
    kernel: Any = _attend_chosen[(num_tokens, parts, shares)]
    kernel(
        *(pool, q, rotated, which, *pages, found, sums, pool.stride(0), layer * pool.stride(1)),
        *(stride for rows in (q, rotated) for stride in rows.stride()[:2]),
        *(scale, most, num_heads, num_tokens * shares * num_heads),
        *(tiling.heads, pool.shape[4], pool.shape[5], rank, rotated.shape[2], tiling.entries),
        *(0 if fp8 is None else fp8.group_columns, chosen, shares > 1),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(pool.device),
    )
    if shares > 1:
        merge: Any = _merge[(num_tokens, cdiv(num_heads, HEADS_PER_MERGE))]
        merge(
            *(found, sums, output, shares, num_heads, num_tokens * shares * num_heads),
            *(HEADS_PER_MERGE, rank),
            **launch_options(pool.device),
        )
    return output


@triton.jit(do_not_specialize=["num_chosen", "all_sums"])
def _attend_chosen(
    pool, q, rotated, which, firsts, kv_indices, found, sums,
    page_elements, layer_elements, q_token, q_head, rotated_token, rotated_head,
    scale, num_chosen, num_heads, all_sums,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, ROW: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr,
    ENTRIES: tl.constexpr, GROUP: tl.constexpr, CHOSEN: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one share of what a token attends to, for HEADS heads. Scores are of base 2.

    GROUP: latents of 8 bits that share a scale, see load_quantized(); 0: entries are as q is. CHOSEN: see _attend().
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, share = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < num_heads
    column, narrow = tl.arange(0, RANK), tl.arange(0, ROTATED)
    q_at = q + token * q_token + head[:, None] * q_head + column[None, :]
    queries = tl.load(q_at, mask=there[:, None], other=0.0)
    rotated_at = rotated + token * rotated_token + head[:, None] * rotated_head + narrow[None, :]
    rotated_queries = tl.load(rotated_at, mask=there[:, None], other=0.0)
    pages = kv_indices + tl.load(firsts + token)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total, weighted = tl.zeros((HEADS,), tl.float32), tl.zeros((HEADS, RANK), tl.float32)
    count = num_chosen if CHOSEN else tl.load(which + token)
    entries_each = tl.cdiv(tl.cdiv(count, ENTRIES), tl.num_programs(2)) * ENTRIES
    first = share * entries_each
    for begin in range(first, tl.minimum(first + entries_each, count), ENTRIES):
        index = begin + tl.arange(0, ENTRIES)
        if CHOSEN:
            position = tl.load(which + token * num_chosen + index, mask=index < num_chosen, other=-1)
            seen = position >= 0
        else:
            position = index
            seen = index < count
        page = tl.load(pages + position // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        entries = pool + page * page_elements + layer_elements + (position % PAGE_SIZE) * ROW
        if GROUP > 0:
            latents = load_quantized(entries, seen, q.dtype.element_ty, RANK, GROUP)
            turned = (entries + RANK + 4 * (RANK // GROUP)).to(tl.pointer_type(q.dtype.element_ty))
        else:
            latents = tl.load(entries[:, None] + column[None, :], mask=seen[:, None], other=0.0)
            turned = entries + RANK
        keys = tl.load(turned[:, None] + narrow[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rotated_queries, tl.trans(keys), scores, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        top, total, weighted = add_keys(top, total, weighted, scores, latents)
    if SHARED:
        row = (token * tl.num_programs(2) + share) * num_heads + head
        tl.store(sums + row, top, mask=there)
        tl.store(sums + all_sums + row, total, mask=there)
        tl.store(found + row[:, None] * RANK + column[None, :], weighted, mask=there[:, None])
    else:
        row = token * num_heads + head
        weighted = (weighted / total[:, None]).to(found.dtype.element_ty)
        tl.store(found + row[:, None] * RANK + column[None, :], weighted, mask=there[:, None])


@triton.jit(do_not_specialize=["shares", "all_sums"])
def _merge(
    found, sums, output, shares, num_heads, all_sums,
    HEADS: tl.constexpr, RANK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has HEADS heads of one token. A share of nothing has a top of -inf."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, RANK)
    there = head < num_heads
    top, total = tl.full((HEADS,), float("-inf"), tl.float32), tl.zeros((HEADS,), tl.float32)
    weighted = tl.zeros((HEADS, RANK), tl.float32)
    for share in range(shares):
        row = (token * shares + share) * num_heads + head
        its_top = tl.load(sums + row, mask=there, other=0.0)
        its_total = tl.load(sums + all_sums + row, mask=there, other=1.0)
        its = tl.load(found + row[:, None] * RANK + column[None, :], mask=there[:, None], other=0.0)
        highest = tl.maximum(top, its_top)
        kept, added = tl.exp2(top - highest), tl.exp2(its_top - highest)
        weighted = weighted * kept[:, None] + its * added[:, None]
        total = total * kept + its_total * added
        top = highest
    place = (token * num_heads + head)[:, None] * RANK + column[None, :]
    tl.store(output + place, (weighted / total[:, None]).to(output.dtype.element_ty), mask=there[:, None])
