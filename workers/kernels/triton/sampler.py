"""A captured step's input tokens and its samples, in a kernel each.

In torch these are many launches: a tenth of what a step of a small model takes (decision 0041).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.sizes import cdiv, next_power_of_2
from tandem.workers.kernels.base import SamplingInputs
from tandem.workers.kernels.triton.sampling import BLOCK as SAMPLE_BLOCK
from tandem.workers.kernels.triton.sampling import WARPS, sample_tokens
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
        block = next_power_of_2(rows)
        arrays = {"tokens": tokens, "sources": sources, "last": last, "inputs": inputs}
        kernel(**arrays, rows=rows, NOT_FINITE=NOT_FINITE, BLOCK=block)
        return inputs

    def sample(self, logits: Tensor, sampling: SamplingInputs, last: Tensor, tickets: Tensor, words: Tensor) -> None:
        rows, vocab = logits.shape
        gathered = torch.empty((rows, SAMPLE_BLOCK), dtype=logits.dtype, device=logits.device)
        indices = torch.empty((rows, SAMPLE_BLOCK), dtype=torch.int32, device=logits.device)
        parts = max(1, min(MAX_PROGRAMS // rows, cdiv(vocab, BLOCK)))
        kernel: Any = sample_tokens[(rows, parts)]
        kernel(
            logits=logits,
            uniforms=sampling.uniforms,
            **sampling.parameters,
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
