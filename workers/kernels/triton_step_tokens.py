"""What a captured step does with token ids before and behind the model, in a kernel each.

In torch these are four and three launches: a tenth of what a step of a small model takes (LOG.md).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.workers.posted_samples import TOKEN_BITS

BLOCK, WARPS = 16384, 16


class TritonStepTokens:
    """See StepTokens."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        rows = tokens.shape[0]
        inputs = torch.empty_like(tokens)
        kernel: Any = _inputs[(1,)]
        kernel(tokens, sources, last, inputs, rows, BLOCK=triton.next_power_of_2(rows))
        return inputs

    def keep_best(self, logits: Tensor, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        rows, vocab = logits.shape
        kernel: Any = _keep_best[(rows,)]
        sizes = (logits.stride(0), words.stride(0), vocab)
        kernel(logits, last, tickets, words, *sizes, TOKEN_BITS=TOKEN_BITS, BLOCK=BLOCK, num_warps=WARPS)


@triton.jit
def _inputs(tokens, sources, last, inputs, rows, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    source = tl.load(sources + row, mask=row < rows, other=-1)
    token = tl.load(tokens + row, mask=row < rows)
    drawn = tl.load(last + source, mask=source >= 0)
    tl.store(inputs + row, tl.where(source >= 0, drawn, token), mask=row < rows)


@triton.jit
def _keep_best(logits, last, tickets, words, pitch, half_size, vocab, TOKEN_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A program a row; each lane keeps the best of what it has seen."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * pitch
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + lane
        logit = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        better = logit > best
        best, where = tl.where(better, logit, best), tl.where(better, token, where)
    token = tl.min(tl.where(best == tl.max(best, 0), where, vocab - 1), 0)
    ticket = tl.load(tickets + row)
    tl.store(last + row, token)
    # One store of eight bytes: who finds the ticket in it has the token, too.
    word = words + ((ticket >> TOKEN_BITS) & 1) * half_size + row
    tl.store(word, ticket | token, mask=ticket > 0, cache_modifier=".wt")
