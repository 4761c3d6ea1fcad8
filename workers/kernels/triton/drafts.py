"""Drafts by prompt lookup between two verify steps, in a kernel after the first and one before the second."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.sizes import next_power_of_2
from tandem.workers.kernels.base import FOLLOWS, Entered, EnteringRows, FollowingRows, Histories
from tandem.workers.sampling.posted_samples import NOT_FINITE

BLOCK = 4096
WARPS = 8
GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)


class TritonDraftKernels:
    """See DraftKernels."""

    def __init__(self, block: int = BLOCK) -> None:
        """block: positions of a history that a program compares at once, a power of 2."""
        self._block = block

    def accept(
        self, tokens: Tensor, sampled: Tensor, positions: Tensor, preceding: Tensor, histories: Histories
    ) -> None:
        rows = tokens.shape[0]
        num_sequences, capacity = histories.tokens.shape
        kernel: Any = _accept[(1,)]
        kernel(
            tokens=tokens,
            sampled=sampled,
            positions=positions,
            preceding=preceding,
            histories=histories.tokens,
            lengths=histories.lengths,
            surplus=histories.surplus,
            rows=rows,
            num_sequences=num_sequences,
            capacity=capacity,
            BLOCK=next_power_of_2(rows),
        )

    def follow(self, rows: FollowingRows, histories: Histories, max_ngram: int) -> Tensor:
        shift = torch.empty_like(rows.preceding)
        kernel: Any = _follow[(rows.tokens.shape[0],)]
        kernel(
            **rows._asdict(),
            histories=histories.tokens,
            lengths=histories.lengths,
            surplus=histories.surplus,
            shift=shift,
            capacity=histories.tokens.shape[1],
            FOLLOWS=FOLLOWS,
            NOT_FINITE=NOT_FINITE,
            MAX_NGRAM=max_ngram,
            BLOCK=self._block,
            num_warps=WARPS,
        )
        return shift

    def enter(self, rows: EnteringRows, number: int, ahead: int, histories: Histories) -> Entered:
        count = rows.sources.shape[0]
        entered = Entered(
            torch.empty_like(rows.sources),
            torch.empty_like(rows.sources),
            torch.empty_like(rows.sources, dtype=torch.int32),
        )
        kernel: Any = _enter[(1,)]
        kernel(
            **rows._asdict(),
            **entered._asdict(),
            histories=histories.tokens,
            lengths=histories.lengths,
            surplus=histories.surplus,
            number=number,
            own=number - ahead,
            rows=count,
            capacity=histories.tokens.shape[1],
            FOLLOWS=FOLLOWS,
            NOT_FINITE=NOT_FINITE,
            BLOCK=next_power_of_2(count),
        )
        return entered

    def put(self, sources: Tensor, drafted: Tensor, number: int, histories: Histories) -> None:
        rows = sources.shape[0]
        kernel: Any = _put[(1,)]
        kernel(
            sources=sources,
            drafted=drafted,
            histories=histories.tokens,
            lengths=histories.lengths,
            number=number,
            rows=rows,
            capacity=histories.tokens.shape[1],
            FOLLOWS=FOLLOWS,
            BLOCK=next_power_of_2(rows),
        )


@triton.jit
def _accept(
    tokens, sampled, positions, preceding, histories, lengths, surplus, rows, num_sequences, capacity,
    BLOCK: tl.constexpr
):  # fmt: skip
    """One program. Of its sequence's rows, a row holds where the last wrong row so far stands before the first."""
    row = tl.arange(0, BLOCK)
    is_row = row < rows
    before = tl.load(preceding + row, mask=is_row, other=0)
    is_first = is_row & (before == 0)
    token = tl.load(tokens + row, mask=is_row, other=0)
    expected = tl.load(sampled + row - 1, mask=is_row & (before > 0), other=0)
    is_wrong = is_row & (before > 0) & (token != expected)
    last_wrong = tl.associative_scan(tl.where(is_wrong, row, -1), 0, _larger)
    holds = is_row & (last_wrong < row - before)

    sequence = (tl.cumsum(is_first.to(tl.int32), 0) - 1).to(tl.int64)
    is_kept = is_row & (sequence < num_sequences)
    place = tl.load(positions + row, mask=is_row, other=0) + 1
    found = tl.load(sampled + row, mask=is_row, other=0).to(tl.int32)
    tl.store(histories + sequence * capacity + place, found, mask=is_kept & holds & (place < capacity))

    # The last row of a sequence knows the last one that holds: the first always does.
    last_held = tl.associative_scan(tl.where(holds, row, -1), 0, _larger)
    is_last = is_kept & (tl.load(preceding + row + 1, mask=row + 1 < rows, other=0) == 0)
    length = tl.load(positions + last_held, mask=is_last, other=0) + 2
    tl.store(lengths + sequence, length.to(tl.int32), mask=is_last)
    tl.store(surplus + sequence, row - last_held, mask=is_last)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def _follow(
    tokens, sources, positions, uniforms, preceding, histories, lengths, surplus, shift, capacity,
    FOLLOWS: tl.constexpr, NOT_FINITE: tl.constexpr, MAX_NGRAM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program has one row."""
    row = tl.program_id(0)
    source = tl.load(sources + row)
    if source > FOLLOWS:
        tl.store(shift + row, 0)
    else:
        sequence = (FOLLOWS - source).to(tl.int64)
        history = histories + sequence * capacity
        last = tl.minimum(tl.load(lengths + sequence), capacity) - 1
        before = tl.load(preceding + row)
        place, end = last, last
        if MAX_NGRAM == 0:
            place, end = last + before, capacity - 1
        elif before > 0:
            place = _first_end(history, last, MAX_NGRAM, BLOCK) + before
        token = tl.load(history + place, mask=(place >= 0) & (place <= end), other=0)
        tl.store(tokens + row, tl.where(token == NOT_FINITE, 0, token).to(tl.int64))
        earlier = tl.load(surplus + sequence)
        tl.store(shift + row, earlier)
        drawn = _uniform(tl.load(uniforms + row), tl.load(positions + row) - earlier + 1)
        tl.store(uniforms + row, drawn.to(tl.int64, bitcast=True))


@triton.jit
def _enter(
    sources, positions, seeds, steps, tokens, uniforms, shift, histories, lengths, surplus, number, own, rows, capacity,
    FOLLOWS: tl.constexpr, NOT_FINITE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program computes all rows."""
    row = tl.arange(0, BLOCK)
    is_row = row < rows
    source = tl.load(sources + row, mask=is_row, other=FOLLOWS + 1)
    follows = source <= FOLLOWS
    sequence = tl.where(follows, FOLLOWS - source, 0)
    place = tl.minimum(tl.load(lengths + sequence, mask=follows, other=1), capacity) - 1 + number
    token = tl.load(histories + sequence * capacity + place, mask=follows & (place < capacity), other=0)
    tl.store(tokens + row, tl.where(token == NOT_FINITE, 0, token).to(tl.int64), mask=is_row)

    earlier = tl.load(surplus + sequence, mask=follows, other=0)
    seed = tl.load(seeds + row, mask=is_row, other=0)
    drawn = _uniform(seed, tl.load(positions + row, mask=is_row, other=0) + number - earlier + 1)
    tl.store(uniforms + row, tl.where(follows, drawn.to(tl.int64, bitcast=True), seed), mask=is_row)

    left = tl.load(steps + row, mask=follows, other=-1)
    on = (left >= own).to(tl.int32)
    first = earlier + tl.where(own == 0, left, 0).to(tl.int32)
    tl.store(shift + row, tl.where(follows, tl.where(own <= 0, first, -on), 0), mask=is_row)


@triton.jit
def _put(
    sources, drafted, histories, lengths, number, rows, capacity, FOLLOWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program writes all rows."""
    row = tl.arange(0, BLOCK)
    sequence = FOLLOWS - tl.load(sources + row, mask=row < rows, other=0)
    place = tl.load(lengths + sequence, mask=sequence >= 0, other=0) + number
    token = tl.load(drafted + row, mask=row < rows, other=0).to(tl.int32)
    tl.store(histories + sequence * capacity + place, token, mask=(sequence >= 0) & (place < capacity))


@triton.jit
def _uniform(seed, position):
    """See tandem.workers.sampling.random; of int64 with a seed's bits."""
    bits = _mix(seed.to(tl.uint64, bitcast=True) + GOLDEN_GAMMA)
    bits = _mix(bits + (position + 1).to(tl.uint64) * GOLDEN_GAMMA)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _first_end(history, last, MAX_NGRAM: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the first place where the longest n-gram that ends at `last` ends; `last` if it occurs nowhere else. Each
    lane keeps the first of the longest that it has seen."""
    lane = tl.arange(0, BLOCK)
    longest = tl.zeros((BLOCK,), tl.int32)
    where = tl.zeros((BLOCK,), tl.int32) + last
    for begin in range(0, last, BLOCK):
        end = begin + lane
        length = tl.zeros((BLOCK,), tl.int32)
        is_same = end < last
        for back in tl.static_range(MAX_NGRAM):  # pyright: ignore[reportGeneralTypeIssues]
            token = tl.load(history + end - back, mask=(end < last) & (end >= back), other=-1)
            is_same &= token == tl.load(history + last - back, mask=last >= back, other=-2)
            length += is_same.to(tl.int32)
        is_longer = length > longest
        longest, where = tl.where(is_longer, length, longest), tl.where(is_longer, end, where)
    return tl.min(tl.where(longest == tl.max(longest, 0), where, last), 0)
