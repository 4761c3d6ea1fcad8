"""K and V of one layer out of their pages, one row a position, for kernels that read them faster from there."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.triton.dependent_launch import launch_options


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
        *(page_size, head_dim, planes * heads, triton.next_power_of_2(planes * heads)),
        *(triton.next_power_of_2(head_dim), fp8_scales is not None),
        **launch_options(pool.device),
    )
    return rows


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
