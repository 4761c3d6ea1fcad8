"""Products of tokens with the matrices of their experts, in one Triton kernel over blocks of one expert each."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.workers.kernels.base import Linear, ScaledLinear
from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.triton.fp8 import quantize_rows

QUANTIZED_ROWS = 64  # of a block, from which activations are in 8 bits, too: there the tensor cores are the limit
QUANTIZED_GROUP = 32  # columns that a tensor core multiplies at once in 8 bits, at least


def grouped_linear(x: Tensor, weights: Linear, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int) -> Tensor:
    """See GroupedLinear. Rows of x lie at any distance, their elements next to each other."""
    weight, bias = weights.weight, weights.bias
    num_experts, columns, depth = weight.shape
    num_blocks, rows = blocks.pairs.shape
    scaled = weights if isinstance(weights, ScaledLinear) else None
    y, x_scales = torch.empty(blocks.num_pairs, columns, dtype=x.dtype, device=x.device), x
    grouped = scaled is not None and scaled.scales.shape[2] > 1
    quantized = (
        scaled is not None and rows >= QUANTIZED_ROWS and depth % scaled.group == 0 and scaled.group >= QUANTIZED_GROUP
    )
    if scaled is not None and quantized:
        x, x_scales = quantize_rows(x, scaled.group if grouped else depth)
    few = rows <= 32
    column_block = min(64 if few else 128, max(16, next_power_of_2(columns)))
    depth_block = min(128 if few else 64, max(16, next_power_of_2(depth)))
    if scaled is not None:
        depth_block = scaled.group if grouped else 128
    kernel: Any = _grouped_linear[(num_blocks, cdiv(columns, column_block))]
    kernel(
        x=x,
        weight=weight,
        bias=bias,
        scale=scale,
        scales=x if scaled is None else scaled.scales,
        x_scales=x_scales,
        y=y,
        **vars(blocks),
        num_experts=num_experts,
        columns=columns,
        depth=depth,
        x_row=x.stride(0),
        weight_expert=weight.stride(0),
        weight_row=weight.stride(1),
        weight_column=weight.stride(2),
        groups=1 if scaled is None else scaled.scales.shape[2],
        row_blocks=1 if scaled is None else scaled.scales.shape[1],
        x_group=x_scales.stride(1),
        FAN_OUT=fan_out,
        ROWS=rows,
        COLUMNS=column_block,
        DEPTH=depth_block,
        HAS_BIAS=bias is not None,
        HAS_SCALE=scale is not None,
        SCALED=scaled is not None,
        GROUPED=grouped,
        ROW_BLOCK=1 if scaled is None else scaled.row_block,
        QUANTIZED=quantized,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4 if rows < 128 else 8,
        num_stages=4 if few else 3,
    )
    return y


@triton.jit(do_not_specialize=["num_pairs"])  # it differs from step to step
def _grouped_linear(
    x, weight, bias, scale, y, pairs, experts,
    scales, x_scales, num_pairs, num_experts, columns, depth, x_row, weight_expert, weight_row, weight_column, groups,
    row_blocks, x_group,
    FAN_OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr, SCALED: tl.constexpr, GROUPED: tl.constexpr, ROW_BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of pairs times COLUMNS rows of its expert's matrix. Blocks of one expert are neighbours: its rows of
    the matrix then come from the cache.

    SCALED: the matrix is a ScaledLinear's. GROUPED: a turn of the loop is one group of columns, else the scales are of
    rows. QUANTIZED: x is in 8 bits, too, with scales as quantize_rows() makes them.
    """
    block = tl.program_id(0)
    expert = tl.load(experts + block).to(tl.int64)
    if expert < num_experts:
        pair = tl.load(pairs + block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        there = pair < num_pairs
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        in_row = column < columns
        step = tl.arange(0, DEPTH)
        x_at = x + (pair // FAN_OUT)[:, None] * x_row + step[None, :]
        weight_at = weight + expert * weight_expert + column[None, :].to(tl.int64) * weight_row
        weight_at += step[:, None].to(tl.int64) * weight_column
        scale_at = scales + (expert * row_blocks + column // ROW_BLOCK) * groups
        x_scale_at = x_scales + pair // FAN_OUT
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for begin in range(0, depth, DEPTH):
            inside = step < depth - begin
            a = tl.load(x_at, mask=there[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight_at, mask=inside[:, None] & in_row[None, :], other=0.0)
            if SCALED and not QUANTIZED:
                b = b.to(tl.float16).to(x.dtype.element_ty)
            if GROUPED:
                part = tl.dot(a, b) * tl.load(scale_at + begin // DEPTH, mask=in_row, other=0.0)[None, :]
                if QUANTIZED:
                    part *= tl.load(x_scale_at + begin // DEPTH * x_group, mask=there, other=0.0)[:, None]
                acc += part
            elif QUANTIZED:
                acc += tl.dot(a, b)  # tensor cores add numbers of 8 bits up with few bits
            else:
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
            x_at += DEPTH
            weight_at += DEPTH * weight_column
        if SCALED and not GROUPED:
            acc *= tl.load(scale_at, mask=in_row, other=0.0)[None, :]
            if QUANTIZED:
                acc *= tl.load(x_scale_at, mask=there, other=0.0)[:, None]
        if HAS_BIAS:
            acc += tl.load(bias + expert * columns + column, mask=in_row, other=0.0).to(tl.float32)[None, :]
        if HAS_SCALE:
            acc *= tl.load(scale + pair, mask=there, other=0.0)[:, None]
        y_at = y + pair[:, None] * columns + column[None, :]
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=there[:, None] & in_row[None, :])
