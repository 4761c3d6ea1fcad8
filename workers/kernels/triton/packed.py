"""PackedKernels: a tile of packed numbers is dequantized in registers, and multiplied there.

Outputs are rows of a product and tokens its columns: a tensor core takes few tokens, but not few outputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.workers.kernels.expert_blocks import ExpertBlocks
from tandem.workers.kernels.packed_linear import PackedLinear

ONE, SEVERAL, LOOKED_UP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # how many groups a tile has
LEAST_DEPTH = 16  # of a tensor core
MANY = 16  # tokens, from which dequantizing once and torch's GEMM take less time
SCRATCH_NUMBERS = 1 << 24  # dequantized at once: in 16 bits a GPU's L2 has them


class TritonPacked:
    """See PackedKernels."""

    def linear(self, x: Tensor, weights: PackedLinear) -> Tensor:
        tokens = x.shape[0]
        if tokens > MANY:
            return _by_scratch(x, weights)
        y = torch.empty(tokens, weights.rows, dtype=x.dtype, device=x.device)
        width = min(128, max(16, next_power_of_2(tokens)))
        _launch(x, weights, y, width, cdiv(tokens, width), num_pairs=tokens)
        return y

    def grouped(
        self, x: Tensor, weights: PackedLinear, blocks: ExpertBlocks, scale: Tensor | None, fan_out: int
    ) -> Tensor:
        y = torch.empty(blocks.num_pairs, weights.rows, dtype=x.dtype, device=x.device)
        num_blocks, width = blocks.pairs.shape
        _launch(
            x, weights, y, width, num_blocks, blocks=blocks, num_pairs=blocks.num_pairs, scale=scale, fan_out=fan_out
        )
        return y


def _launch(
    x: Tensor,
    weights: PackedLinear,
    y: Tensor,
    width: int,
    num_blocks: int,
    *,
    num_pairs: int,
    blocks: ExpertBlocks | None = None,
    scale: Tensor | None = None,
    fan_out: int = 1,
) -> None:
    """width: tokens of a block."""
    depth, groups = _depth(weights, 64 if width > 64 else 128)
    outputs = 128 if width > 64 else 32  # of a product without experts few programs would have many
    kernel: Any = _packed_linear[(cdiv(weights.rows, outputs), num_blocks)]
    kernel(
        x=x,
        numbers=weights.numbers,
        scales=weights.scales,
        zeros=weights.zeros,
        groups=weights.groups,
        bias=weights.bias,
        factors=scale,
        y=y,
        pairs=None if blocks is None else blocks.pairs,
        experts=None if blocks is None else blocks.experts,
        num_pairs=num_pairs,
        num_experts=weights.numbers.shape[0],
        rows=weights.rows,
        columns=weights.columns,
        num_groups=weights.scales.shape[-1],
        x_row=x.stride(0),
        GROUP=weights.group_size,
        GROUPS=groups,
        FAN_OUT=fan_out,
        TOKENS=width,
        OUTPUTS=outputs,
        DEPTH=depth,
        E2M1=weights.is_float,
        EXPERTS=blocks is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4 if width < 128 else 8,
        num_stages=4 if width <= 32 else 3,
    )


def _depth(weights: PackedLinear, depth: int) -> tuple[int, tl.constexpr]:
    """Columns of a tile, at most `depth`, and ONE, SEVERAL or LOOKED_UP."""
    size, depth = weights.group_size, min(depth, max(LEAST_DEPTH, next_power_of_2(weights.columns)))
    if weights.groups is not None:
        return depth, LOOKED_UP
    if weights.scales.shape[-1] == 1 or size % depth == 0:
        return depth, ONE
    power = size & -size
    if power == size:
        return depth, SEVERAL
    return (power, ONE) if power >= LEAST_DEPTH else (depth, LOOKED_UP)


def _by_scratch(x: Tensor, weights: PackedLinear) -> Tensor:
    y = torch.empty(x.shape[0], weights.rows, dtype=x.dtype, device=x.device)
    count = max(1, min(weights.rows, SCRATCH_NUMBERS // weights.columns))
    scratch = torch.empty(count, weights.columns, dtype=x.dtype, device=x.device)
    for begin in range(0, weights.rows, count):
        matrix = scratch[: min(count, weights.rows - begin)]
        depth, groups = _depth(weights, 128)
        kernel: Any = _dequantize[(cdiv(matrix.shape[0], 32), cdiv(weights.columns, depth))]
        kernel(
            numbers=weights.numbers,
            scales=weights.scales,
            zeros=weights.zeros,
            groups=weights.groups,
            matrix=matrix,
            first=begin,
            count=matrix.shape[0],
            columns=weights.columns,
            num_groups=weights.scales.shape[-1],
            GROUP=weights.group_size,
            GROUPS=groups,
            OUTPUTS=32,
            DEPTH=depth,
            E2M1=weights.is_float,
        )
        part = slice(begin, begin + matrix.shape[0])
        if weights.bias is None:
            torch.mm(x, matrix.T, out=y[:, part])
        else:
            torch.addmm(weights.bias[part], x, matrix.T, out=y[:, part])
    return y


@triton.jit(do_not_specialize=["num_pairs"])  # it differs from step to step
def _packed_linear(
    x, numbers, scales, zeros, groups, bias, factors, y, pairs, experts,
    num_pairs, num_experts, rows, columns, num_groups, x_row,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, FAN_OUT: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, E2M1: tl.constexpr, EXPERTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUTPUTS rows of a matrix times a block of tokens. Programs with the same rows are neighbours of one expert."""
    block = tl.program_id(1)
    pair = block * TOKENS + tl.arange(0, TOKENS)
    expert = block * 0
    if EXPERTS:
        pair = tl.load(pairs + pair)
        expert = tl.load(experts + block)
    pair = pair.to(tl.int64)
    if expert < num_experts:
        there = pair < num_pairs
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        row = expert.to(tl.int64) * rows + output
        in_rows = output < rows
        order = groups
        if groups is not None:
            order += expert.to(tl.int64) * columns
        x_at = x + (pair // FAN_OUT)[:, None] * x_row
        acc = tl.zeros((OUTPUTS, TOKENS), dtype=tl.float32)
        for begin in range(0, columns, DEPTH):
            step = begin + tl.arange(0, DEPTH)
            inputs = tl.load(x_at + step[None, :], mask=there[:, None] & (step < columns)[None, :], other=0.0)
            tile = _tile(
                numbers, scales, zeros, order, row, in_rows, begin, columns, num_groups, GROUP, GROUPS, DEPTH, E2M1
            )
            acc = tl.dot(tile.to(inputs.dtype), inputs.trans(), acc, input_precision=PRECISION)
        if bias is not None:
            acc += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        if factors is not None:
            acc *= tl.load(factors + pair, mask=there, other=0.0)[None, :]
        y_at = y + pair[None, :] * rows + output[:, None]
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=in_rows[:, None] & there[None, :])


@triton.jit
def _dequantize(
    numbers, scales, zeros, groups, matrix, first, count, columns, num_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, E2M1: tl.constexpr,
):  # fmt: skip
    """Dequantizes rows `first` … of a matrix, to matrix [count, columns]."""
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    begin = tl.program_id(1) * DEPTH
    step = begin + tl.arange(0, DEPTH)
    there = row < count
    of_all = (first + row).to(tl.int64)
    tile = _tile(numbers, scales, zeros, groups, of_all, there, begin, columns, num_groups, GROUP, GROUPS, DEPTH, E2M1)
    matrix_at = matrix + row.to(tl.int64)[:, None] * columns + step[None, :]
    tl.store(matrix_at, tile.to(matrix.dtype.element_ty), mask=there[:, None] & (step < columns)[None, :])


@triton.jit
def _tile(
    numbers, scales, zeros, groups, row, there, begin, columns, num_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, DEPTH: tl.constexpr, E2M1: tl.constexpr,
):  # fmt: skip
    """float32 [rows, DEPTH] of a matrix, or of all experts' matrices one below another; 0 outside."""
    byte = begin // 2 + tl.arange(0, DEPTH // 2)
    mask = there[:, None] & (byte < columns // 2)[None, :]
    pairs = tl.load(numbers + row[:, None] * (columns // 2) + byte[None, :], mask=mask, other=0).to(tl.int32)
    if GROUPS == SEVERAL:
        number = tl.join(pairs & 15, pairs >> 4).reshape(row.shape[0], DEPTH // GROUP, GROUP)
        group = begin // GROUP + tl.arange(0, DEPTH // GROUP)
        at, mask = row[:, None] * num_groups + group[None, :], there[:, None] & (group < num_groups)[None, :]
        values = _values(number, scales, zeros, at[:, :, None], mask[:, :, None], E2M1)
        values = values.reshape(row.shape[0], DEPTH)
    elif GROUPS == ONE:
        number = tl.join(pairs & 15, pairs >> 4).reshape(row.shape[0], DEPTH)
        at = row * num_groups + (begin // GROUP if num_groups > 1 else 0)
        values = _values(number, scales, zeros, at[:, None], there[:, None], E2M1)
    else:
        number = tl.join(pairs & 15, pairs >> 4).reshape(row.shape[0], DEPTH)
        step = begin + tl.arange(0, DEPTH)
        inside = step < columns
        group = step // GROUP if groups is None else tl.load(groups + step, mask=inside, other=0)
        mask = there[:, None] & inside[None, :]
        values = _values(number, scales, zeros, row[:, None] * num_groups + group[None, :], mask, E2M1)
    return values


@triton.jit
def _values(number, scales, zeros, at, there, E2M1: tl.constexpr):
    """Numbers that count, by the scales and zeros that stand at `at`."""
    if E2M1:
        size = number & 7
        # Exponent and mantissa of float32, whose bias is 126 more; 0 and 0.5 have no hidden bit.
        value = tl.where(size < 2, size * 0.5, ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True))
        value = tl.where(number > 7, -value, value)
        exponent = tl.load(scales + at, mask=there, other=0).to(tl.int32)
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
        result = value * scale
    else:
        scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)
        zero = 8
        if zeros is not None:
            zero = tl.load(zeros + at, mask=there, other=0).to(tl.int32)
        result = (number - zero).to(tl.float32) * scale
    return result
