"""HyperKernels in Triton: three kernels a block.

The first multiplies streams and weights, for which few tokens' columns are divided among programs. Its sums stay in
parts, each with a part of the sum of squares: the norm is a factor that the second applies. The second collapses
the streams, and its last program of a token balances the mix. The third closes the block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.workers.kernels.base import HyperParameters, HyperSettings

FEW = 16  # tokens of a tile of tensor cores, where there are few
MANY = 64
COLUMNS_OF_FEW, COLUMNS_OF_MANY, COLUMNS_OF_EXACT = 256, 128, 32  # of a tile of the projection
PROGRAMS = 256  # that share the projection of few tokens
LEAST = 32  # rows of weights in a tile: with fewer Triton 3.6 and 3.9 take all registers
HIDDEN_OF_FEW, HIDDEN_OF_MANY = 256, 1024  # numbers of each stream that a program collapses or mixes


class TritonHyperKernels:
    """See HyperKernels; streams and parameters are contiguous. Results differ from torch's by the order of
    sums."""

    def open(
        self, streams: Tensor, parameters: HyperParameters, settings: HyperSettings
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, num_streams, _ = streams.shape
        post = torch.empty((num_tokens, num_streams), dtype=torch.float32, device=streams.device)
        mix = torch.empty((num_tokens, num_streams, num_streams), dtype=torch.float32, device=streams.device)
        return _launch_collapse(streams, parameters, settings, (post, mix)), post, mix

    def close(self, streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
        num_tokens, num_streams, hidden = streams.shape
        closed, block = torch.empty_like(streams), _block_of(num_tokens, hidden)
        kernel: Any = _close[(num_tokens, cdiv(hidden, block))]
        kernel(
            *(streams, output.contiguous(), post, mix, closed),
            *(num_streams, next_power_of_2(num_streams), hidden, block),
            **launch_options(streams.device),
        )
        return closed

    def collapse(self, streams: Tensor, parameters: HyperParameters, settings: HyperSettings) -> Tensor:
        return _launch_collapse(streams, parameters, settings, None)


def _launch_collapse(
    streams: Tensor, parameters: HyperParameters, settings: HyperSettings, weights: tuple[Tensor, Tensor] | None
) -> Tensor:
    """weights: post and mix, to be filled; None: of the head, which has none."""
    num_tokens, num_streams, hidden = streams.shape
    parts, block = _project(streams, parameters.fn), _block_of(num_tokens, hidden)
    collapsed = torch.empty((num_tokens, hidden), dtype=streams.dtype, device=streams.device)
    post, mix = (parts, parts) if weights is None else weights
    kernel: Any = _collapse[(num_tokens, cdiv(hidden, block) + (weights is not None))]
    kernel(
        *(streams, parts, parameters.base, parameters.scale, collapsed, post, mix),
        *(parts.shape[1], settings.eps, settings.norm_eps, settings.iterations),
        *(num_streams, next_power_of_2(num_streams), hidden, block),
        *(next_power_of_2(parts.shape[1]), parameters.fn.shape[0], parts.shape[2], weights is not None),
        **launch_options(streams.device),
    )
    return collapsed


def _block_of(num_tokens: int, hidden: int) -> int:
    block = HIDDEN_OF_FEW if num_tokens <= MANY else HIDDEN_OF_MANY
    return min(block, next_power_of_2(hidden))


def _project(streams: Tensor, fn: Tensor) -> Tensor:
    """float32 [T, splits, at least K + 1]: parts of the sums of streams [T, N, H] and fn [K, N·H], then of the sum of
    the streams' squares."""
    num_tokens, (num_rows, num_columns) = streams.shape[0], fn.shape
    tokens, block = (FEW, COLUMNS_OF_FEW) if num_tokens <= FEW else (MANY, COLUMNS_OF_MANY)
    if streams.dtype != torch.bfloat16:
        tokens, block = FEW, COLUMNS_OF_EXACT
    tiles, blocks = cdiv(num_tokens, tokens), cdiv(num_columns, block)
    each = cdiv(blocks, min(blocks, max(1, PROGRAMS // tiles)))
    splits, rows = cdiv(blocks, each), max(LEAST, next_power_of_2(num_rows + 1))
    parts = torch.empty((num_tokens, splits, rows), dtype=torch.float32, device=streams.device)
    kernel: Any = _multiply[(tiles, splits)]
    kernel(
        *(streams, fn, parts, num_tokens, each),
        *(num_columns, num_rows, rows, tokens, block, num_columns % block == 0, each == 1, _operand(streams.device)),
        num_warps=4,
        num_stages=3,
        **launch_options(streams.device),
    )
    return parts


def _operand(device: torch.device) -> Any:
    """Returns the dtype in which tensor cores take numbers of bfloat16. Triton's interpreter has no products of
    bfloat16."""
    return tl.bfloat16 if device.type == "cuda" else tl.float32


@triton.jit(do_not_specialize=["num_tokens", "each"])
def _multiply(
    streams, fn, parts, num_tokens, each,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, ONE: tl.constexpr, OPERAND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has `each` tiles of columns of TOKENS tokens. ONE: that is one tile, whose weights are fetched before
    the streams are there."""
    if PDL:
        gdc_launch_dependents()
    token, row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, ROWS)
    first = tl.program_id(1) * each * BLOCK
    column = first + tl.arange(0, BLOCK)
    token_there, row_there = token < num_tokens, row < COUNT
    lines, rows = fn + row[:, None] * COLUMNS, streams + token.to(tl.int64)[:, None] * COLUMNS
    sums, squares = tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS,), tl.float32)
    if ONE:
        weights = _load_tile(lines, row_there, column, COLUMNS, EVEN)
        if PDL:
            gdc_wait()
        values = _load_tile(rows, token_there, column, COLUMNS, EVEN)
        sums, squares = _add_products(sums, values, weights, OPERAND), _sum_squares(values)
    else:
        if PDL:
            gdc_wait()
        for begin in range(0, tl.minimum(each * BLOCK, COLUMNS - first), BLOCK):
            values = _load_tile(rows, token_there, begin + column, COLUMNS, EVEN)
            weights = _load_tile(lines, row_there, begin + column, COLUMNS, EVEN)
            sums = _add_products(sums, values, weights, OPERAND)
            squares += _sum_squares(values)
    sums = tl.where((row == COUNT)[None, :], squares[:, None], sums)  # pyright: ignore[reportArgumentType]
    target = parts + (token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1))[:, None] * ROWS + row[None, :]
    tl.store(target, sums, mask=token_there[:, None] & (row <= COUNT)[None, :])


@triton.jit
def _load_tile(lines, there, column, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    mask = there[:, None]
    if not EVEN:
        mask = mask & (column < COLUMNS)[None, :]
    return tl.load(lines + column[None, :], mask=mask, other=0.0)


@triton.jit
def _sum_squares(values):
    values = values.to(tl.float32)
    return tl.sum(values * values, 1)


@triton.jit
def _add_products(sums, values, weights, OPERAND: tl.constexpr):
    """sums [TOKENS, ROWS] + values [TOKENS, BLOCK] · float32 weights [ROWS, BLOCK], which are not rounded: three
    numbers of bfloat16 add up to one of float32, and each product with another is exact. OPERAND: see _operand()."""
    if values.dtype == tl.bfloat16:
        values = values.to(OPERAND)
        high = weights.to(tl.bfloat16)
        rest = weights - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(values, tl.trans(low.to(OPERAND)), sums)
        sums = tl.dot(values, tl.trans(middle.to(OPERAND)), sums)
        sums = tl.dot(values, tl.trans(high.to(OPERAND)), sums)
    else:
        sums = tl.dot(values.to(tl.float32), tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["splits"])
def _collapse(
    streams, parts, base, scale, collapsed, post, mix, splits, eps, norm_eps, iterations,
    COUNT: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    WEIGHTS: tl.constexpr, ROWS: tl.constexpr, MIXES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program collapses BLOCK numbers of the COUNT streams of one token, or makes its post and mix."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, stream = tl.arange(0, SPLITS), tl.arange(0, STREAMS)
    there, real = split < splits, stream < COUNT
    lines = parts + (token * splits + split) * ROWS
    squares = tl.sum(tl.load(lines + WEIGHTS, mask=there, other=0.0), 0)
    factor = tl.rsqrt(squares / (COUNT * HIDDEN) + norm_eps)
    if part * BLOCK < HIDDEN:
        column = part * BLOCK + tl.arange(0, BLOCK)
        inside = real[:, None] & (column < HIDDEN)[None, :]
        values = tl.load(streams + (token * COUNT + stream)[:, None] * HIDDEN + column[None, :], mask=inside, other=0.0)
        weights = _sum_weights(lines, there, stream, real, factor, base, tl.load(scale))
        weights = tl.where(real, tl.sigmoid(weights) + eps, 0.0)
        found = tl.sum(weights[:, None] * values.to(tl.float32), 0)
        tl.store(collapsed + token * HIDDEN + column, found.to(collapsed.dtype.element_ty), mask=column < HIDDEN)
    elif MIXES:
        outwards = _sum_weights(lines, there, COUNT + stream, real, factor, base, tl.load(scale + 1))
        tl.store(post + token * COUNT + stream, 2.0 * tl.sigmoid(outwards), mask=real)
        place = stream[:, None] * COUNT + stream[None, :]
        both = real[:, None] & real[None, :]
        sums = tl.sum(
            tl.load(
                lines[:, None, None] + (2 * COUNT + place)[None, :, :],
                mask=there[:, None, None] & both[None, :, :],
                other=0.0,
            ),
            0,
        )
        mixing = sums * factor * tl.load(scale + 2) + tl.load(base + 2 * COUNT + place, mask=both, other=0.0)
        tl.store(mix + token * (COUNT * COUNT) + place, _balance(mixing, real, both, eps, iterations), mask=both)


@triton.jit
def _sum_weights(lines, there, place, real, factor, base, scale):
    """Returns the weights at `place`, summed over all splits and normalised."""
    parts = tl.load(lines[:, None] + place[None, :], mask=there[:, None] & real[None, :], other=0.0)
    return tl.sum(parts, 0) * factor * scale + tl.load(base + place, mask=real, other=0.0)


@triton.jit
def _balance(weights, real, both, eps, iterations):
    """Rows and columns of about the sum 1, by turns. Numbers that are not of `both` are 0."""
    top = tl.where(real, tl.max(tl.where(both, weights, float("-inf")), 1), 0.0)
    mix = tl.where(both, tl.exp(weights - top[:, None]), 0.0)
    mix = tl.where(both, mix / tl.where(real, tl.sum(mix, 1), 1.0)[:, None] + eps, 0.0)
    mix = mix / tl.where(real, tl.sum(mix, 0) + eps, 1.0)[None, :]
    for _ in range(iterations - 1):
        mix = mix / tl.where(real, tl.sum(mix, 1) + eps, 1.0)[:, None]
        mix = mix / tl.where(real, tl.sum(mix, 0) + eps, 1.0)[None, :]
    return mix


@triton.jit
def _close(
    streams, output, post, mix, closed,
    COUNT: tl.constexpr, STREAMS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program has BLOCK numbers of the COUNT streams of one token. It rounds where torch does."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, stream = tl.program_id(0).to(tl.int64), tl.arange(0, STREAMS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, real = column < HIDDEN, stream < COUNT
    dtype = streams.dtype.element_ty
    rows = token * COUNT * HIDDEN + column
    values = tl.load(
        streams + (stream * HIDDEN)[:, None] + rows[None, :], mask=real[:, None] & inside[None, :], other=0.0
    ).to(tl.float32)
    given = tl.load(output + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    for one in tl.static_range(COUNT):  # pyright: ignore[reportGeneralTypeIssues]
        weights = tl.load(mix + (token * COUNT + stream) * COUNT + one, mask=real, other=0.0)
        mixed = tl.sum(weights.to(dtype).to(tl.float32)[:, None] * values, 0).to(dtype)
        expanded = (tl.load(post + token * COUNT + one).to(dtype).to(tl.float32) * given).to(dtype)
        tl.store(closed + rows + one * HIDDEN, (expanded.to(tl.float32) + mixed.to(tl.float32)).to(dtype), mask=inside)
