"""The end of a program of decode.py: it leaves what it has found of a row, and the last one merges all of that."""

import math

import triton
import triton.language as tl

from tandem.cache.kernels.triton.decode_plan import ENDS

LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def leave(
    row_max, row_sum, acc, partial, counter, sinks, output, q_heads, head, count, split, used, first, entries,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, FEW_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, MOST_SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Writes the output of one KV head's q heads, or the part that `split` has found. The last of `used` merges.

    count: tokens of the tile, up to PACK, one after another. q_heads: the first q head of the first token."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    here = row < count * GROUP
    if used == 1:
        if SINKS:
            rows = tl.arange(0, ROWS)
            own = sinks + head * GROUP + (rows % GROUP if PACK > 1 else rows)
            sink = tl.load(own, mask=rows < count * GROUP, other=0.0).to(tl.float32)
            row_sum += tl.exp2(sink * LOG2E - row_max)
        result = acc / row_sum[:, None]
        lines = output + (q_heads + _q_head(row, KV_HEADS, GROUP, PACK)) * HEAD_DIM
        tl.store(lines + column, result.to(output.dtype.element_ty), mask=here)
    else:
        found = partial + ((head * (GROUP * PACK) + row) * entries + first + split) * (HEAD_DIM + ENDS)
        tl.store(found + column, acc, mask=here)
        tl.store(found + HEAD_DIM, row_max[:, None], mask=here)
        tl.store(found + HEAD_DIM + 1, row_sum[:, None], mask=here)
        tl.debug_barrier()  # all threads have stored before the count says so
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)
            partial += first * (HEAD_DIM + ENDS)
            _merge(
                *(partial, sinks, output, q_heads, head, count, used, entries),
                *(KV_HEADS, GROUP, PACK, FEW_ROWS, HEAD_DIM, MOST_SPLITS, SINKS),
            )


@triton.jit
def _q_head(row, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr):
    """Returns the q head of a tile's row, counted from the first one. Each token has KV_HEADS · GROUP q heads."""
    if PACK == 1:
        return row
    return row // GROUP * (KV_HEADS * GROUP) + row % GROUP


@triton.jit
def _merge(
    partial, sinks, output, q_heads, head, count, used, entries,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Writes the output of one KV head's q heads from what its `used` programs have found."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, HEAD_DIM)[None, :]
    split = tl.arange(0, MOST_SPLITS)[None, :]
    here = row < count * GROUP
    found = partial + (head * (GROUP * PACK) + row) * (entries * (HEAD_DIM + ENDS))
    ends = found + split * (HEAD_DIM + ENDS) + HEAD_DIM
    row_max = tl.load(ends, mask=here & (split < used), other=float("-inf"), cache_modifier=".cg")
    row_sums = tl.load(ends + 1, mask=here & (split < used), other=0.0, cache_modifier=".cg")
    highest = tl.max(tl.where(here, row_max, 0.0), 1, keep_dims=True)
    row_sum = tl.sum(row_sums * tl.exp2(row_max - highest), 1, keep_dims=True)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + (row % GROUP if PACK > 1 else row), mask=here, other=0.0).to(tl.float32)
        row_sum += tl.exp2(sink * LOG2E - highest)
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    for _ in tl.range(0, used, loop_unroll_factor=8):  # pyright: ignore[reportGeneralTypeIssues]
        # Unrolled, so that many loads are under way.
        of_one = tl.load(found + column, mask=here, other=0.0, cache_modifier=".cg")
        max_of_one = tl.load(found + HEAD_DIM, mask=here, other=0.0, cache_modifier=".cg")
        acc += of_one * tl.exp2(max_of_one - highest)
        found += HEAD_DIM + ENDS
    result = acc / tl.where(here, row_sum, 1.0)
    lines = output + (q_heads + _q_head(row, KV_HEADS, GROUP, PACK)) * HEAD_DIM
    tl.store(lines + column, result.to(output.dtype.element_ty), mask=here)
