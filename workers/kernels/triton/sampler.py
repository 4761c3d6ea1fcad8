"""A captured step's input tokens and its samples, in a kernel each.

In torch these are many launches: a tenth of what a step of a small model takes (decision 0041).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.workers.kernels.base import SamplingInputs
from tandem.workers.kernels.triton.sampling import BLOCK as SAMPLE_BLOCK
from tandem.workers.kernels.triton.sampling import WARPS, order_of, sample_token
from tandem.workers.sampling.posted_samples import NOT_FINITE, TOKEN_BITS
from tandem.workers.sampling.sample_batch import GREEDY_BELOW

BLOCK = 16384
MAX_PROGRAMS = 128  # as many as run at once
MIN_KEY = -(1 << 63)


class TritonSampler:
    """See Sampler. Rows that are few are read by several programs each."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        """num_rows: of a step at most. Steps follow each other on one stream."""
        self._keys = torch.full((num_rows,), MIN_KEY, dtype=torch.int64, device=device)
        self._done = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        rows = tokens.shape[0]
        inputs = torch.empty_like(tokens)
        kernel: Any = _inputs[(1,)]
        block = triton.next_power_of_2(rows)
        arrays = {"tokens": tokens, "sources": sources, "last": last, "inputs": inputs}
        kernel(**arrays, rows=rows, NOT_FINITE=NOT_FINITE, BLOCK=block)
        return inputs

    def sample(self, logits: Tensor, sampling: SamplingInputs, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        rows, vocab = logits.shape
        gathered = torch.empty((rows, SAMPLE_BLOCK), dtype=logits.dtype, device=logits.device)
        indices = torch.empty((rows, SAMPLE_BLOCK), dtype=torch.int32, device=logits.device)
        parts = max(1, min(MAX_PROGRAMS // rows, triton.cdiv(vocab, BLOCK)))
        kernel: Any = _sample[(rows, parts)]
        kernel(
            logits=logits,
            **vars(sampling),
            gathered=gathered,
            indices=indices,
            last=last,
            tickets=tickets,
            words=words,
            keys=self._keys,
            done=self._done,
            pitch=logits.stride(0),
            half_size=words.stride(0),
            vocab=vocab,
            greedy_below=GREEDY_BELOW,
            parts=parts,
            MIN_KEY=MIN_KEY,
            TOKEN_BITS=TOKEN_BITS,
            NOT_FINITE=NOT_FINITE,
            BLOCK=BLOCK,
            SAMPLE_BLOCK=SAMPLE_BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,  # the best token's weight is 1: its scaled logit is rounded like the best's
        )


@triton.jit
def _inputs(tokens, sources, last, inputs, rows, NOT_FINITE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    source = tl.load(sources + row, mask=row < rows, other=-1)
    token = tl.load(tokens + row, mask=row < rows)
    sampled = tl.load(last + source, mask=source >= 0)
    sampled = tl.where(sampled == NOT_FINITE, 0, sampled)
    tl.store(inputs + row, tl.where(source >= 0, sampled, token), mask=row < rows)


@triton.jit
def _sample(
    logits, uniforms, temperature, top_p, min_p, top_k, gathered, indices, last, tickets, words, keys, done,
    pitch, half_size, vocab, greedy_below, parts, MIN_KEY: tl.constexpr, TOKEN_BITS: tl.constexpr,
    NOT_FINITE: tl.constexpr, BLOCK: tl.constexpr, SAMPLE_BLOCK: tl.constexpr
):  # fmt: skip
    """`parts` programs a row: each brings its best token, and the last one posts the best of these."""
    row, part = tl.program_id(0), tl.program_id(1)
    logits += row.to(tl.int64) * pitch
    ticket = tl.load(tickets + row)
    word = words + ((ticket >> TOKEN_BITS) & 1) * half_size + row
    if tl.load(temperature + row).to(tl.float32) >= greedy_below:
        if part == 0:
            token = sample_token(
                logits, row, uniforms, temperature, top_p, min_p, top_k, gathered, indices, vocab, NOT_FINITE,
                SAMPLE_BLOCK
            )  # fmt: skip
            _post(token, last + row, word, ticket)
    else:
        best, token = _best(logits, part, vocab, parts, BLOCK)
        token = tl.where(tl.abs(best) == float("inf"), NOT_FINITE, token)
        if parts == 1:
            _post(token, last + row, word, ticket)
        else:
            # Of equals the first is the largest: zeros of either sign are equal.
            key = (order_of(tl.where(best == 0, 0.0, best)).to(tl.int64) << 32) + (NOT_FINITE - token)
            tl.atomic_max(keys + row, key)
            if tl.atomic_add(done + row, 1) == parts - 1:
                key = tl.atomic_xchg(keys + row, MIN_KEY)
                tl.store(done + row, 0)
                _post(NOT_FINITE - (key & 0x7FFFFFFF), last + row, word, ticket)


@triton.jit
def _post(token, last, word, ticket):
    tl.store(last, token)
    # One store of eight bytes: a reader that finds the ticket has the token, too.
    tl.store(word, ticket | token, mask=ticket > 0, cache_modifier=".wt")


@triton.jit
def _best(row, part, vocab, parts, BLOCK: tl.constexpr):
    """The best logit of every `parts`-th block, and the first token, int64, that has it. NaN counts as infinity.
    Each lane keeps the best of what it has seen."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for begin in range(part * BLOCK, vocab, parts * BLOCK):
        token = begin + lane
        logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        logit = tl.where(logit != logit, float("inf"), logit)
        better = logit > best
        best, where = tl.where(better, logit, best), tl.where(better, token, where)
    row_max = tl.max(best, 0)
    return row_max, tl.cast(tl.min(tl.where(best == row_max, where, vocab - 1), 0), tl.int64)
