"""The product of a weight and one row: a decode step of one sequence reads every weight once, and no more counts."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    kernel: Any = _gemv[(triton.cdiv(rows, ROWS),)]
    kernel(
        *(x, weight, x if bias is None else bias, output, rows),
        COLUMNS=columns,
        ROWS=ROWS,
        BLOCK=min(block, triton.next_power_of_2(columns)),
        BIAS=bias is not None,
        num_warps=warps,
        num_stages=stages,
    )
    return output


@triton.jit
def _gemv(
    x, weight, bias, output, num_rows,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    column = tl.arange(0, BLOCK)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    lines = weight + row[:, None].to(tl.int64) * COLUMNS
    for begin in range(0, COLUMNS, BLOCK):
        inside = begin + column < COLUMNS
        inputs = tl.load(x + begin + column, mask=inside, other=0.0).to(tl.float32)
        tile = tl.load(
            lines + begin + column[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        sums += tile.to(tl.float32) * inputs[None, :]
    result = tl.sum(sums, 1)
    if BIAS:
        result += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(output + row, result.to(output.dtype.element_ty), mask=there)
