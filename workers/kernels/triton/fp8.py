"""Products with weights in 8 bits: of few rows by the numbers as they are, of many by activations in 8 bits."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.workers.kernels.base import ScaledLinear
from tandem.workers.kernels.triton.gemv import TritonGemv

LEAST_SCALE = 1e-12  # of a group of zeros
GROUPS_AT_ONCE = 32
TILE = (128, 128)  # rows and columns of a block as cuBLASLt takes them
LEAST_TILE = 64  # rows
MOST_SPLITS, STEP = 8, 128  # of the sum; columns of a turn where no group says how many
CUBLASLT_ROWS = 16  # a multiple of which it takes
BLOCKS_SINCE = (12, 9)  # the version of CUDA whose cuBLASLt has scales of blocks
LEAST_TOKENS, FEW_ROWS = 16, 64  # at once; more take turns
FULL_ROWS = 6144  # of a weight, from which cuBLASLt fills a GPU without splits of the sum


class Fp8Gemms:
    """x [T, in] in 16 bits → x · weightᵀ + bias [T, out]. CUDA graphs can capture it, on one stream at a time."""

    def __init__(self, weights: ScaledLinear) -> None:
        self._weights = weights
        rows = weights.weight.shape[0]
        self._counters = torch.zeros(cdiv(rows, LEAST_TILE), dtype=torch.int32, device=weights.weight.device)
        self._most: int | None = None  # rows of x that are not rounded to 8 bits
        if takes_many_rows(weights):
            self._most = LEAST_TOKENS if rows >= FULL_ROWS else FEW_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return TritonGemv().linear(x, self._weights)
        if self._most is None or x.shape[0] <= self._most or x.dtype != torch.bfloat16:
            return few_rows_linear(x, self._weights, self._counters)
        return many_rows_linear(x, self._weights)


def quantize_rows(x: Tensor, group: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """E4M3 [T, K] and float32 scales [T, K / group], whose columns are contiguous. A scale is of `group` columns of a
    row, by their largest number. x: [T, K], its rows contiguous; K a multiple of group, which is K or a power of 2.

    multiple: of the number of rows. Those after T hold anything.
    """
    rows, columns = x.shape
    groups, made = columns // group, cdiv(rows, multiple) * multiple
    numbers = torch.empty((made, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((groups, made), dtype=torch.float32, device=x.device).T
    at_once = min(GROUPS_AT_ONCE, next_power_of_2(groups))
    kernel: Any = _quantize_rows[(rows, cdiv(groups, at_once))]
    kernel(
        x=x,
        numbers=numbers,
        scales=scales,
        scales_column=made,
        x_row=x.stride(0),
        GROUPS=groups,
        GROUP=group,
        AT_ONCE=at_once,
        WIDTH=next_power_of_2(group),
        LEAST=LEAST_SCALE,
        num_warps=4 if at_once * group <= 1024 else 8,
        **launch_options(x.device),
    )
    return numbers, scales


@triton.jit(do_not_specialize=["scales_column"])
def _quantize_rows(
    x, numbers, scales, scales_column, x_row,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    column = tl.arange(0, WIDTH)
    at = group[:, None] * GROUP + column[None, :]
    there = (group < GROUPS)[:, None] & (column < GROUP)[None, :]
    values = tl.load(x + row * x_row + at, mask=there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1), LEAST * 448.0) / 448.0
    scaled = tl.minimum(tl.maximum(values / scale[:, None], -448.0), 448.0)
    tl.store(numbers + row * GROUPS * GROUP + at, scaled.to(numbers.dtype.element_ty), mask=there)
    tl.store(scales + group.to(tl.int64) * scales_column + row, scale, mask=group < GROUPS)


class Tiling(NamedTuple):
    """How programs share a product of few rows."""

    tokens: int  # of a tile
    rows: int  # of the weight
    splits: int  # of the sum
    stages: int


def few_rows_tiling(weights: ScaledLinear, tokens: int) -> Tiling:
    """Chooses by measurement, see decision 0144: programs that read memory fast, with few sums of parts."""
    rows, columns = weights.weight.shape
    token_block = min(FEW_ROWS, max(LEAST_TOKENS, next_power_of_2(tokens)))
    programs, stages = (576, 3) if token_block == LEAST_TOKENS else (256, 4)
    turns, tiles, steps = cdiv(tokens, token_block), cdiv(rows, LEAST_TILE), columns // STEP
    splits = max(1, min(programs // tiles, steps // 4, MOST_SPLITS)) if turns == 1 else 1
    return Tiling(token_block, LEAST_TILE, splits, stages)


def few_rows_linear(x: Tensor, weights: ScaledLinear, counters: Tensor, tiling: Tiling | None = None) -> Tensor:
    """x · weightᵀ + bias [T, out] of x [T, in] in 16 bits, by sums in float32.

    counters: int32 zeros, one for each LEAST_TILE rows of the weight; they are zeros again after it.
    """
    (rows, columns), tokens = weights.weight.shape, x.shape[0]
    tiling = tiling or few_rows_tiling(weights, tokens)
    y, turns = x.new_empty((tokens, rows)), cdiv(tokens, tiling.tokens)
    parts = y
    if tiling.splits > 1:
        parts = torch.empty((tiling.splits, rows, tiling.tokens), dtype=torch.float32, device=x.device)
    groups = weights.scales.shape[1]
    depth = weights.group if groups > 1 else STEP
    kernel: Any = _few_rows[(cdiv(rows, tiling.rows) * tiling.splits, turns)]
    kernel(
        x=x,
        weight=weights.weight,
        scales=weights.scales,
        bias=x if weights.bias is None else weights.bias,
        y=y,
        parts=parts,
        counters=counters,
        num_tokens=tokens,
        num_rows=rows,
        columns=columns,
        groups=groups,
        x_row=x.stride(0),
        TOKENS=tiling.tokens,
        ROWS=tiling.rows,
        DEPTH=depth,
        STEPS=cdiv(cdiv(columns, depth), tiling.splits),
        SPLITS=tiling.splits,
        GROUPED=groups > 1,
        ROW_BLOCK=weights.row_block,
        ONE_SCALE=groups > 1 and weights.row_block % tiling.rows == 0,
        EVEN=rows % tiling.rows == 0 and columns % depth == 0,
        BIAS=weights.bias is not None,
        num_warps=4,
        num_stages=tiling.stages,
        **launch_options(x.device),
    )
    return y


@triton.jit(do_not_specialize=["num_tokens"])
def _few_rows(
    x, weight, scales, bias, y, parts, counters, num_tokens, num_rows, columns, groups, x_row,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr,
    GROUPED: tl.constexpr, ROW_BLOCK: tl.constexpr, ONE_SCALE: tl.constexpr, EVEN: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS outputs of TOKENS tokens, or a part of their sums. The last program of a tile adds its parts up in order.

    GROUPED: a turn of the loop is one group of columns, else the scales are of rows. ONE_SCALE: a tile's rows share it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    step = tl.arange(0, DEPTH)
    in_rows, there = row < num_rows, token < num_tokens
    weight_at = weight + row[:, None].to(tl.int64) * columns + step[None, :]
    x_at = x + token[None, :].to(tl.int64) * x_row + step[:, None]
    scale_at = scales + (row // ROW_BLOCK) * groups
    acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for index in range(split * STEPS, min((split + 1) * STEPS, tl.cdiv(columns, DEPTH))):
        begin = index * DEPTH
        if EVEN:
            numbers = tl.load(weight_at + begin, eviction_policy="evict_first")
            inputs = tl.load(x_at + begin, mask=there[None, :], other=0.0)
        else:
            inside = step < columns - begin
            numbers = tl.load(weight_at + begin, mask=in_rows[:, None] & inside[None, :], other=0.0)
            inputs = tl.load(x_at + begin, mask=inside[:, None] & there[None, :], other=0.0)
        numbers = numbers.to(tl.float16).to(x.dtype.element_ty)
        if GROUPED:
            part = tl.dot(numbers, inputs)
            if ONE_SCALE:
                acc += part * tl.load(scales + (tile * ROWS // ROW_BLOCK) * groups + index)
            else:
                acc += part * tl.load(scale_at + index, mask=in_rows, other=0.0)[:, None]
        else:
            acc = tl.dot(numbers, inputs, acc)
    if SPLITS > 1:
        part_at = parts + row[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(part_at + split * num_rows * TOKENS, acc, mask=in_rows[:, None])
        tl.debug_barrier()
        if tl.atomic_add(counters + tile, 1) < SPLITS - 1:
            return
        tl.store(counters + tile, 0)
        acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        for one in range(SPLITS):
            acc += tl.load(part_at + one * num_rows * TOKENS, mask=in_rows[:, None], cache_modifier=".cg")
    if not GROUPED:
        acc *= tl.load(scale_at, mask=in_rows, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    y_at = y + token[None, :].to(tl.int64) * num_rows + row[:, None]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=in_rows[:, None] & there[None, :])


def many_rows_linear(x: Tensor, weights: ScaledLinear) -> Tensor:
    """few_rows_linear() of bfloat16 by cuBLASLt, with activations in 8 bits, too. weights: see takes_many_rows()."""
    rows, columns = weights.weight.shape
    grouped = weights.scales.shape[1] > 1
    numbers, scales = quantize_rows(x, weights.group if grouped else columns, CUBLASLT_ROWS)
    kinds = F.ScalingType
    of_x, of_weight = (kinds.BlockWise1x128, kinds.BlockWise128x128) if grouped else (kinds.RowWise, kinds.RowWise)
    of_rows = weights.scales.T if grouped else weights.scales.view(1, rows)
    y = F.scaled_mm(numbers, weights.weight.T, scales, of_x, of_rows, of_weight, output_dtype=x.dtype)
    y = y[: x.shape[0]]
    return y if weights.bias is None else y.add_(weights.bias)


def takes_many_rows(weights: ScaledLinear) -> bool:
    """Whether cuBLASLt multiplies by them: on Hopper, from torch 2.10 on, scales of rows or of blocks of 128 x 128."""
    (rows, columns), groups, device = weights.weight.shape, weights.scales.shape[1], weights.weight.device
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if not hopper or not hasattr(F, "scaled_mm") or rows % 16 or columns % 16:
        return False
    blocks = (weights.row_block, weights.group) == TILE and groups % 4 == 0 and columns % TILE[1] == 0
    has_blocks = tuple(map(int, (torch.version.cuda or "0").split("."))) >= BLOCKS_SINCE
    return groups == 1 or (blocks and has_blocks)
