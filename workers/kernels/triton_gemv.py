"""The product of a weight and one row: a decode step of one sequence reads every weight once, and no more counts."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.dependent_launch import launch_options

LONG_INPUT = 8192  # columns from which few warps a program, each with more loads in flight, are faster
ROWS = 4


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, in] · weightᵀ + bias [1, out], summed in float32; weight [out, in] contiguous, in the dtype of x.

    What cuBLAS reaches here is 0.6 to 0.9 of the memory's rate, this 0.75 to 1 (tests/benchmarks/LOG.md).
    """
    rows, columns = weight.shape
    output = torch.empty((1, rows), dtype=x.dtype, device=x.device)
    narrow = columns >= LONG_INPUT or rows <= 4096 <= columns
    block, warps, stages = (512, 2, 4) if narrow else (1024, 4, 3)
    block = min(block, triton.next_power_of_2(columns))
    kernel: Any = _gemv[(triton.cdiv(rows, ROWS),)]
    kernel(
        *(x, weight, x if bias is None else bias, output, rows),
        COLUMNS=columns,
        ROWS=ROWS,
        BLOCK=block,
        EVEN=rows % ROWS == 0 and columns % block == 0,
        BIAS=bias is not None,
        num_warps=warps,
        num_stages=stages,
        **launch_options(x.device),
    )
    return output


@triton.jit
def _gemv(
    x, weight, bias, output, num_rows,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program has ROWS rows of the weight, whose first tiles it fetches before x is there."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    lines = weight + row[:, None].to(tl.int64) * COLUMNS
    there = row < num_rows
    tile = _load_tile(lines, there, column, 0, COLUMNS, EVEN)
    if PDL:
        gdc_wait()
    sums = tile * tl.load(x + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    for begin in range(BLOCK, COLUMNS, BLOCK):
        if EVEN:
            inputs = tl.load(x + begin + column)
        else:
            inputs = tl.load(x + begin + column, mask=begin + column < COLUMNS, other=0.0)
        sums += _load_tile(lines, there, column, begin, COLUMNS, EVEN) * inputs.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(output + row, result.to(output.dtype.element_ty), mask=there)


@triton.jit
def _load_tile(lines, there, column, begin, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """float32 [ROWS, BLOCK], 0 outside. Without masks where none is needed: they cost a sixth of the time."""
    if EVEN:
        tile = tl.load(lines + begin + column[None, :], eviction_policy="evict_first")
    else:
        inside = there[:, None] & (begin + column < COLUMNS)[None, :]
        tile = tl.load(lines + begin + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32)
