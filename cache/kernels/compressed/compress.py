"""Compress, norm, rotate and append in one Triton kernel, which computes what compress_and_append() of reference.py
does."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.base import Compression
from tandem.cache.kernels.compressed.rotate import factors_of, rotate_pairs
from tandem.cache.kernels.compressed.tokens import NewTokens, TokenPages
from tandem.cache.kernels.sizes import next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.plan.rope import Rotation

POSITIONS_PER_TILE = 8


def compress_and_append(
    inputs: Tensor,
    input_layer: int,
    entries: Tensor,
    entry_layer: int,
    x: Compression,
    part: int,
    starts: Rotation | None,
    tokens: NewTokens,
    input_pages: TokenPages,
    entry_pages: TokenPages,
) -> Tensor:
    """See reference.py. D is a power of two; pools and x are contiguous. Rounds once, where the reference rounds before
    it rotates, too."""
    (every, width), size = x.bias.shape, entries.shape[5]
    halves = width // sum(norm.shape[0] for norm in x.norms)
    begin = halves * sum(norm.shape[0] for norm in x.norms[:part])
    count, num_tokens = every * halves, x.values.shape[0]
    made = torch.empty((num_tokens, 1, size), dtype=entries.dtype, device=entries.device)
    cos, sin, pitch, rotated = factors_of(starts, made)
    kernel: Any = _compress[(num_tokens,)]
    kernel(
        *(x.values, x.gates, x.bias, x.norms[part], cos, sin, inputs, entries, made),
        *(tokens.positions, tokens.preceding, tokens.slots),
        *(input_pages.firsts, input_pages.begins, input_pages.kv_indices),
        *(entry_pages.firsts, entry_pages.begins, entry_pages.kv_indices),
        *(pitch, inputs.stride(0), input_layer * inputs.stride(1), inputs.stride(2)),
        *(entries.stride(0), entry_layer * entries.stride(1), x.eps),
        *(width, begin, size, every, count, halves, rotated, inputs.shape[4], entries.shape[4]),
        min(POSITIONS_PER_TILE, next_power_of_2(count)),
        **launch_options(entries.device),
    )
    return made


@triton.jit
def _compress(
    values, gates, bias, norm, cos, sin, inputs, entries, made, positions, preceding, slots,
    input_firsts, input_begins, input_pages, entry_firsts, entry_begins, entry_pages,
    factors_token, input_page_elements, input_layer_elements, input_plane_elements, entry_page_elements,
    entry_layer_elements, eps,
    WIDTH: tl.constexpr, BEGIN: tl.constexpr, SIZE: tl.constexpr, EVERY: tl.constexpr, COUNT: tl.constexpr,
    HALVES: tl.constexpr, ROTATED: tl.constexpr, INPUT_PAGE_SIZE: tl.constexpr, ENTRY_PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has one token. Inputs of new tokens are read where they are given, for other programs may still be
    storing them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    position, slot = tl.load(positions + token), tl.load(slots + token)
    if slot >= 0:
        page = (slot // INPUT_PAGE_SIZE).to(tl.int64)
        row = page * input_page_elements + input_layer_elements + (slot % INPUT_PAGE_SIZE) * WIDTH
        for half in tl.static_range(HALVES):  # pyright: ignore[reportGeneralTypeIssues]
            at = BEGIN + half * SIZE + column
            tl.store(inputs + row + at, tl.load(values + token * WIDTH + at))
            tl.store(inputs + row + input_plane_elements + at, tl.load(gates + token * WIDTH + at))
    if (slot >= 0) & ((position + 1) % EVERY == 0):
        first, begin = tl.load(input_firsts + token), tl.load(input_begins + token)
        before = tl.load(preceding + token)
        top = tl.full((SIZE,), float("-inf"), tl.float32)
        total, pooled = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
        for start in range(0, COUNT, TILE):
            index = start + tl.arange(0, TILE)
            back = COUNT - 1 - index
            there = (index < COUNT) & (position >= back)
            given = (there & (back <= before))[:, None]
            stored = (there & (back > before))[:, None]
            at = BEGIN + tl.where(index >= EVERY, SIZE, 0)[:, None] + column[None, :]
            relative = tl.maximum(position - back - begin, 0)
            places = input_pages + first + relative // INPUT_PAGE_SIZE
            rows = (
                tl.load(places, mask=there, other=0).to(tl.int64) * input_page_elements
                + input_layer_elements
                + (relative % INPUT_PAGE_SIZE) * WIDTH
            )
            of_given = (token - back)[:, None] * WIDTH + at
            of_stored = rows[:, None] + at
            value = tl.load(values + of_given, mask=given, other=0.0) + tl.load(
                inputs + of_stored, mask=stored, other=0.0
            )
            gate = tl.load(gates + of_given, mask=given, other=0.0) + tl.load(
                inputs + input_plane_elements + of_stored, mask=stored, other=0.0
            )
            gate += tl.load(bias + (index % EVERY)[:, None] * WIDTH + at, mask=there[:, None], other=0.0)
            gate = tl.where(there[:, None], gate, float("-inf"))
            highest = tl.maximum(top, tl.max(gate, 0))
            finite = tl.where(highest == float("-inf"), 0.0, highest)
            weights, shrunk = tl.exp(gate - finite[None, :]), tl.exp(top - finite)
            pooled = pooled * shrunk + tl.sum(weights * value, 0)
            total = total * shrunk + tl.sum(weights, 0)
            top = highest
        pooled /= total
        scale = tl.rsqrt(tl.sum(pooled * pooled, 0) / SIZE + eps)
        entry = tl.load(norm + column).to(tl.float32) * (pooled * scale)
        turned = rotate_pairs(
            entry[None, :],
            cos + token * factors_token,
            sin + token * factors_token,
            1.0,
            tl.constexpr(1),
            SIZE,
            ROTATED,
        )
        turned = tl.reshape(turned, (SIZE,)).to(entries.dtype.element_ty)
        relative = position // EVERY - tl.load(entry_begins + token)
        its = tl.load(entry_pages + tl.load(entry_firsts + token) + relative // ENTRY_PAGE_SIZE).to(tl.int64)
        target = entries + its * entry_page_elements + entry_layer_elements + (relative % ENTRY_PAGE_SIZE) * SIZE
        tl.store(target + column, turned)
        tl.store(made + token * SIZE + column, turned)
