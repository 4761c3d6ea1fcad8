"""FusedGemms of one row: a GEMV takes as long as reading its weight.

The operations around a GEMV in a decoder layer are in its kernel: the norm of the row, the gate of a feed-forward and
the sum with the residual. So a layer is five kernels. Each fetches its first weights while the one before ends.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.workers.kernels.base import Linear, RmsNorm, ScaledLinear

WHOLE_ROW = 4096  # columns that a program multiplies at once, at most


class TritonGemv:
    """See FusedGemms. This reads memory at 0.75 to 1 of its rate, cuBLAS at 0.6 to 0.9 (decision 0039)."""

    def linear(self, x: Tensor, weights: Linear, norm: RmsNorm | None = None) -> Tensor:
        return _launch(x, weights, norm, x.new_empty((1, weights.weight.shape[0])))

    def linear_silu_mul(self, x: Tensor, weights: Linear, norm: RmsNorm) -> Tensor:
        return _launch(x, weights, norm, x.new_empty((1, weights.weight.shape[0] // 2)), gated=True)

    def add_linear(self, residual: Tensor, x: Tensor, weights: Linear) -> None:
        _launch(x, weights, None, residual, add=True)


def _launch(
    x: Tensor, weights: Linear, norm: RmsNorm | None, output: Tensor, *, gated: bool = False, add: bool = False
) -> Tensor:
    weight, bias = weights.weight, weights.bias
    rows, columns = output.shape[1], weight.shape[1]
    per_program, block, warps, stages = _tiling(columns, gated)
    scaled = weights if isinstance(weights, ScaledLinear) else None
    grouped = scaled is not None and scaled.scales.shape[1] > 1
    if scaled is not None:
        per_program, block, warps, stages = scaled_tiling(columns, gated)
        if grouped and (scaled.row_block % per_program or rows % per_program):
            per_program = 1  # whose rows would not share scales
    kernel: Any = _gemv[(cdiv(rows, per_program),)]
    kernel(
        x=x,
        weight=weight,
        bias=x if bias is None else bias,
        gain=x if norm is None else norm.weight,
        scales=x if scaled is None else scaled.scales,
        output=output,
        num_rows=rows,
        groups=0 if scaled is None else scaled.scales.shape[1],
        eps=0.0 if norm is None else norm.eps,
        COLUMNS=columns,
        ROWS=per_program,
        BLOCK=block,
        EVEN=rows % per_program == 0 and columns % block == 0,
        BIAS=bias is not None,
        NORM=norm is not None,
        GATED=gated,
        ADD=add,
        SCALED=scaled is not None,
        GROUP=scaled.group if scaled is not None and grouped else 0,
        ROW_BLOCK=1 if scaled is None else scaled.row_block,
        num_warps=warps,
        num_stages=stages,
        **launch_options(x.device),
    )
    return output


def _tiling(columns: int, gated: bool) -> tuple[int, int, int, int]:
    """Outputs of a program, columns at once, warps and stages; by measurement, see decision 0039.

    Whole rows where they are short: then nearly all of a program's weights are on their way before x is there.
    """
    if columns > WHOLE_ROW:
        return (2 if gated else 4), 1024, 4, 3
    block = next_power_of_2(columns)
    return (2 if gated or block > 1024 else 4), block, 4, 1


def scaled_tiling(columns: int, gated: bool) -> tuple[int, int, int, int]:
    """_tiling() of a weight in 8 bits; by measurement, see decision 0144."""
    return (2 if gated else 4), next_power_of_2(min(columns, WHOLE_ROW)), 4, 1


@triton.jit
def _gemv(
    x, weight, bias, gain, scales, output, num_rows, groups, eps,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program makes ROWS outputs. The first tiles of the weight are fetched before x is there."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    lines = weight + row[:, None].to(tl.int64) * COLUMNS
    up_lines = weight + (row + num_rows)[:, None].to(tl.int64) * COLUMNS
    there = row < num_rows
    tile = _load_tile(lines, there, column, 0, COLUMNS, EVEN)
    up_tile = tile
    if GATED:
        up_tile = _load_tile(up_lines, there, column, 0, COLUMNS, EVEN)
    if PDL:
        gdc_wait()
    inputs, squares = _load_inputs(x, gain, column, 0, COLUMNS, EVEN, NORM)
    first = tl.program_id(0) * ROWS
    scale_at, up_scale_at = scales + first // ROW_BLOCK * groups, scales + (first + num_rows) // ROW_BLOCK * groups
    sums = tile * _scale(inputs, scale_at, column, 0, COLUMNS, GROUP)[None, :]
    up_sums = up_tile * _scale(inputs, up_scale_at, column, 0, COLUMNS, GROUP)[None, :] if GATED else sums
    for begin in range(BLOCK, COLUMNS, BLOCK):
        inputs, more = _load_inputs(x, gain, column, begin, COLUMNS, EVEN, NORM)
        scaled = _scale(inputs, scale_at, column, begin, COLUMNS, GROUP)
        sums += _load_tile(lines, there, column, begin, COLUMNS, EVEN) * scaled[None, :]
        if GATED:
            scaled = _scale(inputs, up_scale_at, column, begin, COLUMNS, GROUP)
            up_sums += _load_tile(up_lines, there, column, begin, COLUMNS, EVEN) * scaled[None, :]
        squares += more
    factor = 1.0
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / COLUMNS + eps)
    dtype = output.dtype.element_ty
    row_scales = scales + row // ROW_BLOCK * groups
    result = _finish(tl.sum(sums, 1) * factor, bias + row, row_scales, there, BIAS, SCALED and GROUP == 0)
    if GATED:
        gate = result.to(dtype).to(tl.float32)
        row_scales = scales + (row + num_rows) // ROW_BLOCK * groups
        up = _finish(tl.sum(up_sums, 1) * factor, bias + num_rows + row, row_scales, there, BIAS, SCALED and GROUP == 0)
        up = up.to(dtype).to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
    if ADD:
        result = result.to(dtype).to(tl.float32) + tl.load(output + row, mask=there, other=0.0).to(tl.float32)
    tl.store(output + row, result.to(dtype), mask=there)


@triton.jit
def _finish(sums, biases, row_scales, there, BIAS: tl.constexpr, SCALED: tl.constexpr):
    if SCALED:
        sums *= tl.load(row_scales, mask=there, other=0.0)
    if BIAS:
        sums += tl.load(biases, mask=there, other=0.0).to(tl.float32)
    return sums


@triton.jit
def _scale(inputs, scales, column, begin, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The inputs, each times the scale of its column's group: a program's rows share them."""
    if GROUP > 0:
        inputs *= tl.load(scales + (begin + column) // GROUP, mask=begin + column < COLUMNS, other=0.0)
    return inputs


@triton.jit
def _load_inputs(x, gain, column, begin, COLUMNS: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr):
    """float32 [BLOCK], 0 outside: the row, times `gain` where it is normed; and its squares."""
    if EVEN:
        inputs = tl.load(x + begin + column).to(tl.float32)
        weighed = inputs
        if NORM:
            weighed = inputs * tl.load(gain + begin + column).to(tl.float32)
    else:
        inside = begin + column < COLUMNS
        inputs = tl.load(x + begin + column, mask=inside, other=0.0).to(tl.float32)
        weighed = inputs
        if NORM:
            weighed = inputs * tl.load(gain + begin + column, mask=inside, other=0.0).to(tl.float32)
    return weighed, inputs * inputs


@triton.jit
def _load_tile(lines, there, column, begin, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    """float32 [ROWS, BLOCK], 0 outside. Without masks where none is needed: they cost a sixth of the time."""
    if EVEN:
        tile = tl.load(lines + begin + column[None, :], eviction_policy="evict_first")
    else:
        inside = there[:, None] & (begin + column < COLUMNS)[None, :]
        tile = tl.load(lines + begin + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32)
