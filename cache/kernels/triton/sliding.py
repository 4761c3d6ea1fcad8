"""A decode step of sequences that slide, and of others, in one Triton kernel that rotates K as it reads it.

What it computes is what tandem.cache.kernels.torch.sliding computes: see there for which K meets which q.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.sizes import next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.tree import add_keys, add_sink, end_softmax
from tandem.cache.plan.rope import Rotation

LEAST_ROWS = 16  # of a product on tensor cores
KEYS_PER_TILE = 64


def attend_sliding(
    pool: Tensor,
    layer: int,
    q: Tensor,
    tables: DeviceTables,
    rotation: Rotation | None,
    scoring: Scoring,
    sinks: Tensor | None = None,
    fp8_scales: Tensor | None = None,
) -> Tensor:
    """o [B, num_q_heads, head_dim] of q, rotated in rows of sequences that do not slide, each over its own pages.

    pool: [num_pages, layers, 2, num_kv_heads, page_size, head_dim], contiguous; head_dim is a power of two of at least
    16. tables: with `sliding`. rotation: its table only is read; None without RoPE. sinks: [num_q_heads]. fp8_scales:
    of a float8_e4m3fn pool, float32 [2, num_kv_heads].
    """
    _, _, _, num_kv_heads, page_size, head_dim = pool.shape
    assert tables.sliding is not None, "graph buffers of steps that slide have it"
    rows, group = q.shape[0], q.shape[1] // num_kv_heads
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kernel: Any = _attend_sliding[(rows, num_kv_heads)]
    kernel(
        *(pool, q.contiguous(), output, sinks, fp8_scales, None if rotation is None else rotation.table),
        *(tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len, tables.sliding),
        *(rows, pool.stride(0), layer * pool.stride(1), scoring.scale, scoring.softcap or 0.0),
        *(num_kv_heads, group, max(LEAST_ROWS, next_power_of_2(group)), page_size, head_dim),
        *(0 if rotation is None else rotation.table.shape[2], KEYS_PER_TILE),
        *(scoring.softcap is not None, sinks is not None, fp8_scales is not None),
        **launch_options(pool.device),
    )
    return output


@triton.jit
def _rotate(x, rolled, factors, column, turns, ROTARY: tl.constexpr):
    """x [n, columns] · cos + rolled · sin in float32. factors: pointers [n, 1] to the rows of the table. turns: bool
    [n, 1], the rows of x that are rotated."""
    inside = turns & (column < ROTARY)
    cos = tl.load(factors + column, mask=inside, other=1.0).to(tl.float32)
    sin = tl.load(factors + ROTARY + column, mask=inside, other=0.0).to(tl.float32)
    return x.to(tl.float32) * cos + rolled.to(tl.float32) * sin


@triton.jit
def _attend_sliding(
    pool, q, output, sinks, fp8_scales, rotations, kv_indptr, kv_indices, last_page_lens, sliding,
    rows, page_elements, layer_elements, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr, KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has the q heads of one KV head of one row; scores are of base 2."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sink, hole = tl.load(sliding + row), tl.load(sliding + rows + row)
    turned_sinks, turned = tl.load(sliding + 2 * rows + row), tl.load(sliding + 3 * rows + row)
    index, position = tl.load(sliding + 4 * rows + row), tl.load(sliding + 5 * rows + row)
    first = tl.load(kv_indptr + row)
    length = (tl.load(kv_indptr + row + 1) - first - 1) * PAGE_SIZE + tl.load(last_page_lens + row)
    group, column = tl.arange(0, HEADS), tl.arange(0, HEAD_DIM)[None, :]
    there = group < GROUP
    head = kv_head * GROUP + group
    elements = (row * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM
    queries = tl.load(q + elements + column, mask=there[:, None], other=0.0)
    in_text = queries
    rolled = column
    if ROTARY:
        rolled = tl.where(column < ROTARY, (column + ROTARY // 2) % ROTARY, column)
        turning = tl.load(q + elements + rolled, mask=there[:, None], other=0.0)
        own = rotations + tl.full((HEADS, 1), index, tl.int64) * (2 * ROTARY)
        text = rotations + tl.full((HEADS, 1), position, tl.int64) * (2 * ROTARY)
        in_text = _rotate(queries, turning, text, column, there[:, None], ROTARY).to(queries.dtype)
        queries = _rotate(queries, turning, own, column, there[:, None], ROTARY).to(queries.dtype)
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    weighted = tl.zeros((HEADS, HEAD_DIM), tl.float32)
    if HAS_SINKS:
        top, total, weighted = add_sink(top, total, weighted, tl.load(sinks + head, mask=there, other=0.0))
    k_scale = tl.load(fp8_scales + kv_head) if FP8 else 1.0
    v_scale = tl.load(fp8_scales + KV_HEADS + kv_head) if FP8 else 1.0
    for begin in range(0, length, KEYS):
        key = begin + tl.arange(0, KEYS)
        is_sink = key < sink
        inside = (key < length) & (is_sink | (key >= sink + hole))
        is_turned = key < tl.where(is_sink, turned_sinks, turned)
        page = tl.load(kv_indices + first + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
        place = page * page_elements + layer_elements + kv_head * (PAGE_SIZE * HEAD_DIM) + (key % PAGE_SIZE) * HEAD_DIM
        lines = pool + place[:, None]
        keys = tl.load(lines + column, mask=inside[:, None], other=0.0)
        values = tl.load(lines + KV_HEADS * PAGE_SIZE * HEAD_DIM + column, mask=inside[:, None], other=0.0)
        if FP8:
            keys = (keys.to(tl.float32) * k_scale).to(queries.dtype)
            values = (values.to(tl.float32) * v_scale).to(queries.dtype)
        if ROTARY:
            others = tl.load(lines + rolled, mask=inside[:, None], other=0.0)
            if FP8:
                others = (others.to(tl.float32) * k_scale).to(queries.dtype)
            factors = rotations + tl.where(is_sink, key, key - hole).to(tl.int64)[:, None] * (2 * ROTARY)
            keys = _rotate(keys, others, factors, column, (inside & ~is_turned)[:, None], ROTARY).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        in_place = tl.dot(in_text, tl.trans(keys), input_precision="ieee")
        scores = tl.where((is_turned & ~is_sink)[None, :], in_place, scores) * scale
        if SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(inside[None, :], scores * 1.4426950408889634, float("-inf"))
        top, total, weighted = add_keys(top, total, weighted, scores, values)
    end_softmax(output + elements + column, total, weighted, there)
