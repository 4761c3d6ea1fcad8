"""choose_top() of long rows, which several programs share: four kernels that count digits, and one that writes.

Each row is cut into chunks of neighbouring scores, a program each, by the row's own length: with a longer buffer no
program gets more. A kernel finds the digit before its own from the counts of all chunks, and counts its own:

    kernel   0          1          2          3          write
    finds               digit 0    digit 1    digit 2    digit 3: the k-th highest score, how many above it are in
    counts   digit 0    digit 1    digit 2    digit 3               each chunk, and how many of its equals

Its time does not depend on the scores.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.cache.kernels.sizes import next_power_of_2
from tandem.cache.kernels.triton.dependent_launch import launch_options

SCORES_AT_ONCE = 2048
WARPS = 8
DIGITS = 4  # of a score
DIGIT = tl.constexpr(256)  # values of a digit of 8 bits


def choose_in_chunks(scores: Tensor, lengths: Tensor, top_k: int, num_chunks: int) -> Tensor:
    """See choose_top(); num_chunks: at least 1, programs of a row."""
    num_rows, device = scores.shape[0], scores.device
    chosen = torch.empty((num_rows, top_k), dtype=torch.int32, device=device)
    counts = torch.empty((num_rows, DIGITS, num_chunks, DIGIT.value), dtype=torch.int32, device=device)
    above = torch.empty((num_rows, DIGITS, num_chunks), dtype=torch.int32, device=device)
    found = torch.empty((num_rows, DIGITS, 2), dtype=torch.int32, device=device)
    sizes = scores.stride(0), top_k, num_chunks, SCORES_AT_ONCE, next_power_of_2(num_chunks)
    options = {"num_warps": WARPS, **launch_options(device)}
    for digit in range(DIGITS):
        count: Any = _count[(num_rows, num_chunks)]
        count(scores, lengths, counts, above, found, *sizes, digit, **options)
    write: Any = _write[(num_rows, num_chunks)]
    write(scores, lengths, chosen, counts, above, found, *sizes, **options)
    return chosen


@triton.jit
def in_order(scores, position, inside):
    """uint32, in the order of the scores: the sign is turned, and of negative ones all bits. -0 is 0."""
    score = tl.load(scores + position, mask=inside, other=0.0)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def write_all(chosen, length, top_k, BLOCK: tl.constexpr):
    """Writes positions 0 … length - 1, then -1."""
    for begin in range(0, top_k, BLOCK):
        position = begin + tl.arange(0, BLOCK)
        tl.store(chosen + position, tl.where(position < length, position, -1), mask=position < top_k)


@triton.jit
def write_taken(scores, chosen, begin, end, least, wanted, num_taken, num_equal, BLOCK: tl.constexpr):
    """Positions begin … end - 1 of scores above `least`, and of its equals up to number `wanted` of the row. num_taken,
    num_equal: how many of both, and how many equals, come before."""
    for first in range(begin, end, BLOCK):
        position = first + tl.arange(0, BLOCK)
        inside = position < end
        key = in_order(scores, position, inside)
        equal = tl.where(inside & (key == least), 1, 0)
        is_first = (equal > 0) & (num_equal + tl.cumsum(equal, 0) <= wanted)
        taken = tl.where((inside & (key > least)) | is_first, 1, 0)
        tl.store(chosen + num_taken + tl.cumsum(taken, 0) - 1, position, mask=taken > 0)
        num_taken += tl.sum(taken, 0)
        num_equal += tl.sum(equal, 0)


@triton.jit
def _chunk_of(length, num_chunks, BLOCK: tl.constexpr):
    """Scores of a chunk, whole blocks; and how many chunks have any."""
    size = tl.cdiv(length, num_chunks * BLOCK) * BLOCK
    return size, tl.cdiv(length, size)


@triton.jit
def _find(
    counts, above, wanted, least, used, num_chunks, BELOW: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Finds digit BELOW from its counts. What is found of a row up to that digit: the k-th highest key's digits, how
    many with them are wanted, and [CHUNKS], how many of each chunk are above it and how many have its digits.

    counts, above: at the row. wanted, least: of digits before BELOW. used: chunks that have scores.
    """
    value, chunk = tl.arange(0, DIGIT), tl.arange(0, CHUNKS)
    there = chunk < used
    its = tl.load(counts + (BELOW * num_chunks + chunk)[:, None] * DIGIT + value[None, :], mask=there[:, None], other=0)
    summed = tl.sum(its, 0)
    as_high = tl.cumsum(summed, 0, reverse=True)  # of this value or a higher one
    digit = tl.max(tl.where(as_high >= wanted, value, 0), 0)
    wanted -= tl.sum(tl.where(value > digit, summed, 0), 0)
    least = least | (digit << (24 - 8 * BELOW))  # pyright: ignore[reportOperatorIssue]
    higher = tl.sum(tl.where(value[None, :] > digit, its, 0), 1)
    if BELOW > 0:
        higher += tl.load(above + (BELOW - 1) * num_chunks + chunk, mask=there, other=0)
    equal = tl.sum(tl.where(value[None, :] == digit, its, 0), 1)
    return wanted, least, higher, equal


@triton.jit(do_not_specialize=["scores_row", "top_k", "num_chunks"])
def _count(
    scores, lengths, counts, above, found, scores_row, top_k, num_chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, NUMBER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program counts the values of digit NUMBER in one chunk, of scores whose digits before are the k-th highest's.
    The first of a row keeps what it found for the next kernel."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    if length > top_k:
        size, used = _chunk_of(length, num_chunks, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
        if own < used:
            counts += row * (4 * DIGIT) * num_chunks
            above += row * 4 * num_chunks
            found += row * 8
            wanted, least = top_k, tl.full((), 0, tl.int32)
            if NUMBER > 0:
                if NUMBER > 1:
                    wanted, least = tl.load(found + 2 * (NUMBER - 2)), tl.load(found + 2 * (NUMBER - 2) + 1)
                wanted, least, higher, _ = _find(counts, above, wanted, least, used, num_chunks, NUMBER - 1, CHUNKS)
                if own == 0:
                    chunk = tl.arange(0, CHUNKS)
                    tl.store(above + (NUMBER - 1) * num_chunks + chunk, higher, mask=chunk < used)
                    tl.store(found + 2 * (NUMBER - 1), wanted)
                    tl.store(found + 2 * (NUMBER - 1) + 1, least)
            summed = tl.zeros((DIGIT,), tl.int32)
            prefix = least.to(tl.uint32, bitcast=True)
            for begin in range(own * size, tl.minimum((own + 1) * size, length), BLOCK):
                position = begin + tl.arange(0, BLOCK)
                inside = position < length
                key = in_order(scores + row * scores_row, position, inside)
                if NUMBER > 0:
                    inside = inside & ((key >> (32 - 8 * NUMBER)) == (prefix >> (32 - 8 * NUMBER)))
                summed += tl.histogram(((key >> (24 - 8 * NUMBER)) & 255).to(tl.int32), DIGIT, mask=inside)
            tl.store(counts + (NUMBER * num_chunks + own) * DIGIT + tl.arange(0, DIGIT), summed)


@triton.jit(do_not_specialize=["scores_row", "top_k", "num_chunks"])
def _write(
    scores, lengths, chosen, counts, above, found, scores_row, top_k, num_chunks,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program writes what is chosen of one chunk, after what chunks before it write."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, own = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + row)
    chosen += row * top_k
    if length <= top_k:
        if own == 0:
            write_all(chosen, length, top_k, BLOCK)
    else:
        size, used = _chunk_of(length, num_chunks, BLOCK)  # pyright: ignore[reportGeneralTypeIssues]
        if own < used:
            counts += row * (4 * DIGIT) * num_chunks
            above += row * 4 * num_chunks
            wanted, least = tl.load(found + row * 8 + 4), tl.load(found + row * 8 + 5)
            wanted, least, higher, equal = _find(
                counts,
                above,
                wanted,
                least,
                used,
                num_chunks,
                3,  # pyright: ignore[reportArgumentType]
                CHUNKS,
            )
            before = tl.arange(0, CHUNKS) < own
            num_equal = tl.sum(tl.where(before, equal, 0), 0)
            num_taken = tl.sum(tl.where(before, higher, 0), 0) + tl.minimum(num_equal, wanted)
            end = tl.minimum((own + 1) * size, length)
            key = least.to(tl.uint32, bitcast=True)
            write_taken(scores + row * scores_row, chosen, own * size, end, key, wanted, num_taken, num_equal, BLOCK)
