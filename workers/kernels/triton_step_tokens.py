"""What a captured step does with token ids before and behind the model, in a kernel each.

In torch these are many launches: a tenth of what a step of a small model takes (LOG.md).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.workers.kernels.base import RowDraws
from tandem.workers.kernels.triton_sampling import BLOCK as DRAW_BLOCK
from tandem.workers.kernels.triton_sampling import WARPS, draw_token
from tandem.workers.posted_samples import TOKEN_BITS
from tandem.workers.sample_batch import GREEDY_BELOW

BLOCK = 16384


class TritonStepTokens:
    """See StepTokens."""

    def inputs(self, tokens: Tensor, sources: Tensor, last: Tensor) -> Tensor:
        rows = tokens.shape[0]
        inputs = torch.empty_like(tokens)
        kernel: Any = _inputs[(1,)]
        kernel(tokens, sources, last, inputs, rows, BLOCK=triton.next_power_of_2(rows))
        return inputs

    def keep(self, logits: Tensor, draws: RowDraws, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        rows, vocab = logits.shape
        gathered = torch.empty((rows, DRAW_BLOCK), dtype=logits.dtype, device=logits.device)
        places = torch.empty((rows, DRAW_BLOCK), dtype=torch.int32, device=logits.device)
        columns = (draws.draws, draws.temperature, draws.top_p, draws.min_p, draws.top_k, gathered, places)
        kernel: Any = _keep[(rows,)]
        kernel(
            *(logits, *columns, last, tickets, words, logits.stride(0), words.stride(0), vocab, GREEDY_BELOW),
            TOKEN_BITS=TOKEN_BITS,
            BLOCK=BLOCK,
            DRAW_BLOCK=DRAW_BLOCK,
            num_warps=WARPS,
        )


@triton.jit
def _inputs(tokens, sources, last, inputs, rows, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    source = tl.load(sources + row, mask=row < rows, other=-1)
    token = tl.load(tokens + row, mask=row < rows)
    drawn = tl.load(last + source, mask=source >= 0)
    tl.store(inputs + row, tl.where(source >= 0, drawn, token), mask=row < rows)


@triton.jit
def _keep(
    logits, draws, temperature, top_p, min_p, top_k, gathered, places, last, tickets, words, pitch, half_size, vocab,
    greedy_below, TOKEN_BITS: tl.constexpr, BLOCK: tl.constexpr, DRAW_BLOCK: tl.constexpr
):  # fmt: skip
    """A program a row."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * pitch
    if tl.load(temperature + row).to(tl.float32) < greedy_below:
        token = _best(logits, vocab, BLOCK)
    else:
        token = draw_token(
            logits, row, draws, temperature, top_p, min_p, top_k, gathered, places, vocab, DRAW_BLOCK
        )  # fmt: skip
    ticket = tl.load(tickets + row)
    tl.store(last + row, token)
    # One store of eight bytes: who finds the ticket in it has the token, too.
    word = words + ((ticket >> TOKEN_BITS) & 1) * half_size + row
    tl.store(word, ticket | token, mask=ticket > 0, cache_modifier=".wt")


@triton.jit
def _best(row, vocab, BLOCK: tl.constexpr):
    """The first of the best tokens, int64. Each lane keeps the best of what it has seen."""
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + lane
        logit = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        better = logit > best
        best, where = tl.where(better, logit, best), tl.where(better, token, where)
    return tl.cast(tl.min(tl.where(best == tl.max(best, 0), where, vocab - 1), 0), tl.int64)
