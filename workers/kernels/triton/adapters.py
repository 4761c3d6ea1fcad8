"""LoRA adapters by Triton: x · Aᵀ of each row's adapter, in parts of the columns, their sum, and · Bᵀ, added to y.

Rows come as they are, in no order of their adapters. A program multiplies a whole block of rows by a slot's matrix;
rows of other slots are left out of the result. So a decode step reads each adapter once, whatever its rows; a prompt's
blocks have one slot, and programs of others end at once.

    x [T, K] ── a[slot] [P·R, K] ──► low [splits, T, P·R] ── Σ ──► [T, P·R] ── b[slot] [N, R] ──► y [T, N] +=
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.workers.kernels.adapter_linear import AdapterKernels, AdapterMatrices

LEAST = 16  # rows and columns that a tensor core multiplies
MOST_ROWS = 64  # of a block
PROGRAMS = 256  # about as many as keep a GPU's memory busy
DEPTH = 128  # columns of x at once, at most
TILE_BYTES = 16 << 10  # of a, at once
WIDTH = 64  # rows of a that a program multiplies
COLUMNS = 128  # of y that a program adds to
FEW_BLOCKS = 4  # of rows: then each slot has programs of its own, which all run at once
SUMS = 512  # numbers that a program adds up


class TritonAdapters(AdapterKernels):
    """Kernels for 16 bits or float32, on a GPU or in Triton's interpreter."""

    def add(self, y: Tensor, x: Tensor, matrices: AdapterMatrices, slots: Tensor) -> None:
        """See AdapterKernels."""
        if x.shape[0]:
            self._add(y, self._shrink(x, matrices, slots), matrices, slots)

    def add_to(self, product: Callable[[], Tensor], x: Tensor, matrices: AdapterMatrices, slots: Tensor) -> Tensor:
        """See AdapterKernels. In a graph, x · Aᵀ is computed on a stream of its own, during the product."""
        if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
            return super().add_to(product, x, matrices, slots)
        current, side = torch.cuda.current_stream(x.device), side_stream(x.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            low = self._shrink(x, matrices, slots)
        y = product()
        current.wait_stream(side)
        self._add(y, low, matrices, slots)
        return y

    def _shrink(self, x: Tensor, matrices: AdapterMatrices, slots: Tensor) -> Tensor:
        """x · Aᵀ [T, P·R], in the dtype of x where its parts were added up, else float32. Rows without an adapter hold
        anything."""
        (rows, depth), (num_slots, low_columns, _) = x.shape, matrices.a.shape
        block = block_of(rows)
        row_blocks = cdiv(rows, block)
        splits = num_splits(depth, row_blocks * num_slots)
        low = torch.empty((splits, rows, low_columns), dtype=torch.float32, device=x.device)
        width = max(LEAST, min(WIDTH, next_power_of_2(low_columns)))
        column_blocks, step = cdiv(low_columns, width), min(DEPTH, TILE_BYTES // (width * x.element_size()))
        shrink: Any = _shrink[(row_blocks, num_slots * column_blocks, splits)]
        shrink(
            x=x,
            a=matrices.a,
            slots=slots,
            low=low,
            rows=rows,
            depth=depth,
            split=cdiv(cdiv(depth, splits), DEPTH) * DEPTH,
            column_blocks=column_blocks,
            x_row=x.stride(0),
            a_slot=matrices.a.stride(0),
            LOW=low_columns,
            BLOCK=block,
            WIDTH=width,
            DEPTH=step,
            PRECISION=precision_of(x),
            num_warps=4,
        )
        if splits == 1:
            return low[0]
        total = torch.empty((rows, low_columns), dtype=x.dtype, device=x.device)
        size = total.numel()
        add_up: Any = _add_up[(cdiv(size, SUMS),)]
        add_up(low, slots, total, size, LOW=low_columns, SPLITS=splits, BLOCK=SUMS)
        return total

    def _add(self, y: Tensor, low: Tensor, matrices: AdapterMatrices, slots: Tensor) -> None:
        """Adds low · Bᵀ to y. low: the result of _shrink()."""
        (rows, columns), rank, num_slots = y.shape, matrices.rank, matrices.a.shape[0]
        block = block_of(rows)
        row_blocks = cdiv(rows, block)
        each = 1 if row_blocks <= FEW_BLOCKS else num_slots
        expand: Any = _expand[(row_blocks, cdiv(columns, COLUMNS), cdiv(num_slots, each))]
        expand(
            low=low,
            b=matrices.b,
            slots=slots,
            y=y,
            ends=matrices.on_device,
            rows=rows,
            columns=columns,
            num_slots=num_slots,
            each=each,
            y_row=y.stride(0),
            b_slot=matrices.b.stride(0),
            LOW=low.shape[1],
            RANK=rank,
            WIDTH=max(LEAST, next_power_of_2(rank)),
            PARTS=len(matrices.ends),
            BLOCK=block,
            COLUMNS=COLUMNS,
            ONE=each == 1,
            PRECISION=precision_of(y),
            num_warps=4,
        )

    def compile(self, matrices: AdapterMatrices) -> None:
        """See AdapterKernels. By rows of no slot, which take no memory."""
        (num_slots, _, depth), columns, rows, splits = matrices.a.shape, matrices.ends[-1], LEAST, 0
        like = {"dtype": matrices.a.dtype, "device": matrices.a.device}
        while splits != 1 or rows <= MOST_ROWS:
            x, y = (torch.zeros(1, size, **like).expand(rows, -1) for size in (depth, columns))
            self.add(y, x, matrices, torch.full((rows,), -1, device=x.device))
            splits, rows = num_splits(depth, cdiv(rows, MOST_ROWS) * num_slots), 2 * rows
        torch.zeros(1, device=matrices.a.device).item()  # errors are raised here


@lru_cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all products of a device. They follow one another."""
    return torch.cuda.Stream(device)


def block_of(rows: int) -> int:
    """Returns the rows that a program has."""
    return max(LEAST, min(MOST_ROWS, next_power_of_2(rows)))


def precision_of(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def num_splits(depth: int, programs: int) -> int:
    """Returns the number of parts into which columns are cut for so many programs: a power of 2."""
    most = max(1, depth // (2 * DEPTH))
    wanted = min(most, max(1, PROGRAMS // programs))
    return 1 << (wanted.bit_length() - 1)


@triton.jit(do_not_specialize=["rows"])  # it differs from prompt to prompt
def _shrink(
    x, a, slots, low, rows, depth, split, column_blocks, x_row, a_slot,
    LOW: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows · some columns of WIDTH rows of one slot's a. low gets the rows of this slot; others are another
    program's, or nobody's."""
    slot, part = tl.program_id(1) // column_blocks, tl.program_id(2)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    own = there & (tl.load(slots + row, mask=there, other=-1) == slot)
    if tl.sum(own.to(tl.int32), 0) > 0:  # pyright: ignore[reportOperatorIssue]
        column = tl.program_id(1) % column_blocks * WIDTH + tl.arange(0, WIDTH)
        step = tl.arange(0, DEPTH)
        begin = part * split
        end = tl.minimum(begin + split, depth)
        x_at = x + row[:, None].to(tl.int64) * x_row + step[None, :]
        a_at = a + slot.to(tl.int64) * a_slot + column[None, :].to(tl.int64) * depth + step[:, None]
        acc = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
        for at in range(begin, end, DEPTH):
            inside = step < end - at
            left = tl.load(x_at + at, mask=own[:, None] & inside[None, :], other=0.0)
            right = tl.load(a_at + at, mask=inside[:, None] & (column < LOW)[None, :], other=0.0)
            acc = tl.dot(left, right, acc, input_precision=PRECISION)
        low_at = low + (part.to(tl.int64) * rows + row[:, None]) * LOW + column[None, :]
        tl.store(low_at, acc, mask=own[:, None] & (column < LOW)[None, :])


@triton.jit(do_not_specialize=["size"])
def _add_up(low, slots, total, size, LOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums low over splits to total[i] = Σ low[s, i], for rows with a slot."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (at < size) & (tl.load(slots + at // LOW, mask=at < size, other=-1) >= 0)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        acc += tl.load(low + split * size + at, mask=there, other=0.0)
    tl.store(total + at, acc.to(total.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _expand(
    low, b, slots, y, ends, rows, columns, num_slots, each, y_row, b_slot,
    LOW: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, ONE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows and COLUMNS columns of y: for each of `each` slots that has some of the rows, and each part of
    the columns, low · b. Rows of other slots are another program's, or nobody's. ONE: `each` is 1."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    slot_of = tl.load(slots + row, mask=there, other=-1).to(tl.int32)
    first_slot = tl.program_id(2) * each
    last_slot = tl.minimum(first_slot + each, num_slots)
    mine = (slot_of >= first_slot) & (slot_of < last_slot)
    if tl.sum(mine.to(tl.int32), 0) > 0:  # pyright: ignore[reportOperatorIssue]
        first = tl.program_id(1) * COLUMNS
        column, rank = first + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
        y_at = y + row[:, None].to(tl.int64) * y_row + column[None, :]
        changed = mine[:, None] & (column < columns)[None, :]
        acc = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
        begin = 0
        for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            end = tl.load(ends + part)
            if (begin < first + COLUMNS) & (end > first):
                low_at = low + row[:, None].to(tl.int64) * LOW + part * RANK + rank[None, :]
                left = tl.load(low_at, mask=mine[:, None] & (rank < RANK)[None, :], other=0.0).to(b.dtype.element_ty)
                inside = (column >= begin) & (column < end)
                matrix = b + first_slot.to(tl.int64) * b_slot + column[None, :].to(tl.int64) * RANK + rank[:, None]
                filled = inside[None, :] & (rank < RANK)[:, None]
                if ONE:
                    acc = tl.dot(left, tl.load(matrix, mask=filled, other=0.0), acc, input_precision=PRECISION)
                else:
                    for slot in range(first_slot, last_slot):
                        own = slot_of == slot
                        if tl.sum(own.to(tl.int32), 0) > 0:  # pyright: ignore[reportOperatorIssue]
                            added = tl.dot(left, tl.load(matrix, mask=filled, other=0.0), input_precision=PRECISION)
                            acc += tl.where(own[:, None] & inside[None, :], added, 0.0)
                        matrix += b_slot
            begin = end
        acc += tl.load(y_at, mask=changed, other=0.0).to(tl.float32)
        tl.store(y_at, acc.to(y.dtype.element_ty), mask=changed)
