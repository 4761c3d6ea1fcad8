"""The positions of the highest scores: a Triton kernel, which gives what choose() of torch/index.py does.

Radix select (Alabi et al., 2012): the k-th highest score is found digit by digit, by counting the scores with each
digit. Then one pass writes, in order, the positions of higher scores, and of the first equal ones. One program does all
of a row, or several share long rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import cdiv
from tandem.cache.kernels.triton.dependent_launch import launch_options
from tandem.cache.kernels.triton.top_k_chunks import (
    DIGIT,
    SCORES_AT_ONCE,
    WARPS,
    choose_in_chunks,
    in_order,
    write_all,
    write_taken,
)

PROGRAMS = 512  # that share the scores of few rows
MOST_CHUNKS = 64  # of a row
LONG = 2  # times SCORES_AT_ONCE: rows of more are cut into chunks


def choose_top(scores: Tensor, lengths: Tensor, top_k: int) -> Tensor:
    """int32 [n, top_k]: in order, the positions of the highest of the first lengths[i] scores of row i, of equal ones
    the first; then -1, where there are fewer.

    scores: float32 [n, m], rows contiguous; lengths: int32 [n].
    """
    num_rows, blocks = scores.shape[0], cdiv(scores.shape[1], SCORES_AT_ONCE)
    chunks = min(blocks, MOST_CHUNKS, PROGRAMS // max(num_rows, 1))
    if blocks > LONG and chunks > 1:
        return choose_in_chunks(scores, lengths, top_k, chunks)
    chosen = torch.empty((num_rows, top_k), dtype=torch.int32, device=scores.device)
    kernel: Any = _choose[(num_rows,)]
    kernel(
        *(scores, lengths, chosen, scores.stride(0), top_k, SCORES_AT_ONCE),
        num_warps=WARPS,
        **launch_options(scores.device),
    )
    return chosen


@triton.jit
def _find_least(scores, length, top_k, BLOCK: tl.constexpr):
    """The top_k-th highest of the first `length` scores, as in_order() has it, and how many of its equals to take."""
    value = tl.arange(0, DIGIT)
    least, wanted = tl.full((), 0, tl.uint32), top_k
    for digit in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        counts = tl.zeros((DIGIT,), tl.int32)
        for begin in range(0, length, BLOCK):
            position = begin + tl.arange(0, BLOCK)
            inside = position < length
            key = in_order(scores, position, inside)
            if digit > 0:
                inside = inside & ((key >> (32 - 8 * digit)) == (least >> (32 - 8 * digit)))
            counts += tl.histogram(((key >> (24 - 8 * digit)) & 255).to(tl.int32), DIGIT, mask=inside)
        as_high = tl.cumsum(counts, 0, reverse=True)  # of this value or a higher one
        found = tl.max(tl.where(as_high >= wanted, value, 0), 0)
        wanted -= tl.sum(tl.where(value > found, counts, 0), 0)
        least = least | (found.to(tl.uint32) << (24 - 8 * digit))  # pyright: ignore[reportAttributeAccessIssue]
    return least, wanted


@triton.jit(do_not_specialize=["scores_row", "top_k"])
def _choose(
    scores, lengths, chosen, scores_row, top_k, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Each program has one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    scores += row * scores_row
    chosen += row * top_k
    if length <= top_k:
        write_all(chosen, length, top_k, BLOCK)
    else:
        least, wanted = _find_least(scores, length, top_k, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
        none = tl.full((), 0, tl.int32)
        write_taken(scores, chosen, 0, length, least, wanted, none, none, BLOCK)
