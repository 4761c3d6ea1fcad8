"""Attention to a window and to entries with sinks, K = V in one plane: Triton kernels, which compute what attend() of
reference.py does.

With few tokens, several programs share the reads of each (flash-decoding), and a second kernel merges their results.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.compressed.rotate import factors_of, rotate_pairs
from tandem.cache.kernels.compressed.tokens import TokenPages
from tandem.cache.kernels.entry_tiling import EntryTiling, choose_tiling
from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.tree import add_keys
from tandem.cache.plan.rope import Rotation

SHARES_PER_TILE = 16  # that are merged at once
MANY = EntryTiling(heads=64, entries=64, warps=8, stages=2, programs=132)


def attend(
    window: tuple[Tensor, int, TokenPages],
    width: int,
    entries: tuple[Tensor, int, TokenPages] | None,
    visible: Tensor | None,
    chosen: Tensor | None,
    q: Tensor,
    positions: Tensor,
    sinks: Tensor,
    scale: float,
    rotation: Rotation | None,
    longest: int,
) -> Tensor:
    """See reference.py. D is a power of two of at least 16; pools, q and chosen are contiguous."""
    (pool, layer, pages), (num_tokens, num_heads, size) = window, q.shape
    beside, beside_layer, beside_pages = window if entries is None else entries
    extra = 0 if entries is None else longest if chosen is None else chosen.shape[1]
    tiling = choose_tiling(q, MANY)
    parts = cdiv(num_heads, tiling.heads)
    tiles = cdiv(width, tiling.entries) + cdiv(extra, tiling.entries)
    shares = min(tiles, max(1, tiling.programs // (num_tokens * parts)))
    output = torch.empty((num_tokens, num_heads, size), dtype=q.dtype, device=pool.device)
    found, sums = output, output
    if shares > 1:
        found = torch.empty((num_tokens, shares, num_heads, size), dtype=torch.float32, device=pool.device)
        sums = torch.empty((2, num_tokens, shares, num_heads), dtype=torch.float32, device=pool.device)
    cos, sin, pitch, rotated = factors_of(rotation, q)
    kernel: Any = _attend[(num_tokens, parts, shares)]
    kernel(
        *(pool, beside, q, positions if visible is None else visible, positions if chosen is None else chosen),
        *(positions, sinks, cos, sin, pages.firsts, pages.begins, pages.kv_indices),
        *(beside_pages.firsts, beside_pages.begins, beside_pages.kv_indices, found, sums),
        *(pool.stride(0), layer * pool.stride(1), beside.stride(0), beside_layer * beside.stride(1), pitch),
        *(scale, extra, num_heads, num_tokens * shares * num_heads, tiling.heads),
        *(pool.shape[4], beside.shape[4], size, rotated, width, tiling.entries),
        *(entries is not None, chosen is not None, shares > 1),
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(pool.device),
    )
    if shares > 1:
        merge: Any = _merge[(num_tokens, num_heads)]
        merge(
            *(found, sums, output, cos, sin, pitch, shares, num_heads, num_tokens * shares * num_heads),
            *(min(SHARES_PER_TILE, next_power_of_2(shares)), next_power_of_2(shares), size, rotated),
            **launch_options(pool.device),
        )
    return output


@triton.jit(do_not_specialize=["extra", "all_sums"])
def _attend(
    pool, beside, q, visible, chosen, positions, sinks, cos, sin, firsts, begins, kv_indices,
    beside_firsts, beside_begins, beside_indices, found, sums,
    page_elements, layer_elements, beside_page_elements, beside_layer_elements, factors_token,
    scale, extra, num_heads, all_sums,
    HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BESIDE_PAGE_SIZE: tl.constexpr, SIZE: tl.constexpr,
    ROTATED: tl.constexpr, WINDOW: tl.constexpr, ENTRIES: tl.constexpr,
    BESIDE: tl.constexpr, CHOOSES: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one share of what a token reads, for HEADS heads: as many tiles as any other, by what this token
    reads, or none. The window's tiles come first, from the newest position on. Scores are of base 2."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    WINDOW_TILES: tl.constexpr = (WINDOW + ENTRIES - 1) // ENTRIES
    token, share = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, SIZE)
    there = head < num_heads
    queries = tl.load(q + (token * num_heads + head)[:, None] * SIZE + column[None, :], mask=there[:, None], other=0.0)
    position = tl.load(positions + token).to(tl.int32)
    pages, begin = kv_indices + tl.load(firsts + token), tl.load(begins + token)
    tiles, most = WINDOW_TILES, extra
    beside_pages, beside_begin = beside_indices, 0
    if BESIDE:
        most = tl.load(visible + token)
        tiles += tl.cdiv(extra if CHOOSES else most, ENTRIES)
        beside_pages, beside_begin = beside_indices + tl.load(beside_firsts + token), tl.load(beside_begins + token)
    # The first share begins with the sink, a key of the value 0.
    sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * 1.4426950408889634
    top = tl.where(share == 0, sink, float("-inf"))
    total = tl.where(share == 0, tl.full((HEADS,), 1.0, tl.float32), 0.0)
    weighted = tl.zeros((HEADS, SIZE), tl.float32)
    each = tl.cdiv(tiles, tl.num_programs(2))
    for tile in range(share * each, tl.minimum((share + 1) * each, tiles)):
        back = tile * ENTRIES + tl.arange(0, ENTRIES)
        seen = (tile < WINDOW_TILES) & (back < WINDOW) & (back <= position)
        relative = tl.maximum(position - back - begin, 0)
        page = tl.load(pages + relative // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        rows = pool + page * page_elements + layer_elements + (relative % PAGE_SIZE) * SIZE
        if BESIDE:
            index = (tile - WINDOW_TILES) * ENTRIES + tl.arange(0, ENTRIES)
            entry = index
            if CHOOSES:
                inside = (index >= 0) & (index < extra)
                entry = tl.load(chosen + token * extra + index, mask=inside, other=-1)
            among = (entry >= 0) & (entry < most)
            relative = tl.maximum(entry - beside_begin, 0)
            page = tl.load(beside_pages + relative // BESIDE_PAGE_SIZE, mask=among, other=0).to(tl.int64)
            offset = page * beside_page_elements + beside_layer_elements + (relative % BESIDE_PAGE_SIZE) * SIZE
            rows = tl.where(among, beside + offset, rows)
            seen = seen | among
        rows = tl.multiple_of(rows, 16)  # where() of pointers forgets it, and loads have 2 bytes then
        keys = tl.load(rows[:, None] + column[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores * 1.4426950408889634, float("-inf"))
        top, total, weighted = add_keys(top, total, weighted, scores, keys)
    if SHARED:
        row = (token * tl.num_programs(2) + share) * num_heads + head
        tl.store(sums + row, top, mask=there)
        tl.store(sums + all_sums + row, total, mask=there)
        written = head < tl.where(share * each < tiles, num_heads, 0)  # of others _merge reads their tops alone
        tl.store(found + row[:, None] * SIZE + column[None, :], weighted, mask=written[:, None])
    else:
        row = token * num_heads + head
        weighted = weighted / total[:, None]
        weighted = rotate_pairs(
            weighted, cos + token * factors_token, sin + token * factors_token, -1.0, HEADS, SIZE, ROTATED
        )
        target = found + row[:, None] * SIZE + column[None, :]
        tl.store(target, weighted.to(found.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=["shares", "all_sums"])
def _merge(
    found, sums, output, cos, sin, factors_token, shares, num_heads, all_sums,
    TILE: tl.constexpr, SHARES: tl.constexpr, SIZE: tl.constexpr, ROTATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one head of one token, and reads TILE of its shares at once. SHARES: at least all. A share of
    nothing has a top of -inf; the first has the sink."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    share, column = tl.arange(0, SHARES), tl.arange(0, SIZE)
    first = token * shares * num_heads + head
    tops = tl.load(sums + first + share * num_heads, mask=share < shares, other=float("-inf"))
    totals = tl.load(sums + all_sums + first + share * num_heads, mask=share < shares, other=0.0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp2(tops - top), 0)
    weighted = tl.zeros((SIZE,), tl.float32)
    for begin in range(0, shares, TILE):
        its = begin + tl.arange(0, TILE)
        rows = first + its * num_heads
        its_top = tl.load(sums + rows, mask=its < shares, other=float("-inf"))
        there = its_top > float("-inf")
        values = tl.load(found + rows[:, None] * SIZE + column[None, :], mask=there[:, None], other=0.0)
        weighted += tl.sum(values * tl.exp2(its_top - top)[:, None], 0)
    turned = rotate_pairs(
        (weighted / total)[None, :],
        cos + token * factors_token,
        sin + token * factors_token,
        -1.0,
        tl.constexpr(1),
        SIZE,
        ROTATED,
    )
    place = output + (token * num_heads + head) * SIZE + column
    tl.store(place, tl.reshape(turned, (SIZE,)).to(output.dtype.element_ty))
