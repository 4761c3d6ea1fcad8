"""K and V of one layer out of their pages, one row a position, for kernels that read them faster from there."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.plan.kv_scales import Fp8Rows


def gather(
    pool: Tensor, layer: int, slots: Tensor, dtype: torch.dtype | None = None, fp8_scales: Tensor | None = None
) -> Tensor:
    """[n, planes, num_kv_heads, head_dim], K at 0 and V at 1, or latent entries, of slots int32 [n].

    pool: [num_pages, layers, planes, num_kv_heads, page_size, head_dim], contiguous. fp8_scales: of a float8_e4m3fn
    pool, float32 [2, num_kv_heads], by which its entries are multiplied before they are rounded to dtype.
    """
    _, _, planes, heads, page_size, head_dim = pool.shape
    rows = torch.empty((slots.shape[0], planes, heads, head_dim), dtype=dtype or pool.dtype, device=pool.device)
    kernel: Any = _gather[(slots.shape[0],)]
    kernel(
        *(pool, slots, rows, fp8_scales, pool.stride(0), layer * pool.stride(1)),
        *(page_size, head_dim, planes * heads, next_power_of_2(planes * heads)),
        *(next_power_of_2(head_dim), fp8_scales is not None),
        **launch_options(pool.device),
    )
    return rows


def gather_rows(pool: Tensor, layer: int, slots: Tensor, fp8: Fp8Rows) -> Tensor:
    """[n, fp8.width] of fp8.dtype: latents or index keys of slots int32 [n], dequantized.

    pool: [num_pages, layers, 1, 1, page_size, fp8.num_bytes], contiguous, of 8-bit elements.
    """
    rows = torch.empty((slots.shape[0], fp8.width), dtype=fp8.dtype, device=pool.device)
    others = fp8.width - fp8.quantized
    kernel: Any = _gather_rows[(slots.shape[0],)]
    kernel(
        *(pool, slots, rows, pool.stride(0), layer * pool.stride(1)),
        *(pool.shape[4], fp8.num_bytes, fp8.quantized, next_power_of_2(fp8.quantized), fp8.group_columns),
        *(fp8.num_groups, others, next_power_of_2(max(others, 1))),
        **launch_options(pool.device),
    )
    return rows


@triton.jit
def _gather_rows(
    pool, slots, rows, page_bytes, layer_bytes,
    PAGE_SIZE: tl.constexpr, ROW: tl.constexpr, QUANTIZED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, OTHERS: tl.constexpr, OTHERS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program has one position."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + position)
    source = pool + (slot // PAGE_SIZE).to(tl.int64) * page_bytes + layer_bytes + (slot % PAGE_SIZE) * ROW
    target = rows + position * (QUANTIZED + OTHERS)
    dtype = rows.dtype.element_ty
    column = tl.arange(0, BLOCK)
    entries = tl.load(source + column, mask=column < QUANTIZED).to(tl.float32)
    scales = tl.load((source + QUANTIZED).to(tl.pointer_type(tl.float32)) + column // GROUP, mask=column < QUANTIZED)
    tl.store(target + column, (entries * scales).to(dtype), mask=column < QUANTIZED)
    if OTHERS > 0:
        other = tl.arange(0, OTHERS_BLOCK)
        values = tl.load((source + QUANTIZED + 4 * GROUPS).to(tl.pointer_type(dtype)) + other, mask=other < OTHERS)
        tl.store(target + QUANTIZED + other, values, mask=other < OTHERS)


@triton.jit
def _gather(
    pool, slots, rows, fp8_scales, page_elements, layer_elements,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, LINES: tl.constexpr, LINES_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program a position: its lines, a head of K or of V each, lie a page's positions apart."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + position)
    line = tl.arange(0, LINES_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (line < LINES) & (column < HEAD_DIM)
    source = pool + (slot // PAGE_SIZE).to(tl.int64) * page_elements + layer_elements + (slot % PAGE_SIZE) * HEAD_DIM
    values = tl.load(source + line * (PAGE_SIZE * HEAD_DIM) + column, mask=there)
    if FP8:
        values = values.to(tl.float32) * tl.load(fp8_scales + line, mask=line < LINES)
        values = values.to(rows.dtype.element_ty)
    tl.store(rows + (position * LINES + line) * HEAD_DIM + column, values, mask=there)
