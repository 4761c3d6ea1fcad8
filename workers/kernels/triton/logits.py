"""Processes a step's logits in one kernel, and counts what was sampled in another."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.cache.kernels.sizes import cdiv
from tandem.workers.kernels.base import RuleTables
from tandem.workers.sampling import logit_rules
from tandem.workers.sampling.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED_TOKENS

BLOCK, WARPS = 4096, 8
MAX_REGISTERS = 128  # of a thread: two programs share a multiprocessor. Without a limit Triton 3.7 takes 144
PRESENCE, FREQUENCY = tl.constexpr(logit_rules.PRESENCE), tl.constexpr(logit_rules.FREQUENCY)
REPETITION, FIRST_OUTPUT = tl.constexpr(logit_rules.REPETITION), tl.constexpr(logit_rules.FIRST_OUTPUT)
MIN_TOKENS, NUM_BIASED = tl.constexpr(logit_rules.MIN_TOKENS), tl.constexpr(logit_rules.NUM_BIASED)
NUM_WORDS, BIASED = tl.constexpr(logit_rules.NUM_WORDS), tl.constexpr(logit_rules.BIASED)
BIAS, STOPS = tl.constexpr(logit_rules.BIAS), tl.constexpr(logit_rules.STOPS)
WORDS, LATEST = tl.constexpr(logit_rules.WORDS), tl.constexpr(logit_rules.LATEST)
RECORD, NUM_LATEST = tl.constexpr(logit_rules.RECORD), tl.constexpr(logit_rules.NUM_LATEST)
MOST_BIASED, MOST_STOPS = tl.constexpr(MAX_BIASED_TOKENS), tl.constexpr(logit_rules.MOST_STOPS)
MOST_WORDS, WORD = tl.constexpr(MAX_BAD_WORDS), tl.constexpr(MAX_BAD_WORD_TOKENS)
MOST_COUNTED, NOTHING = tl.constexpr(logit_rules.MOST_COUNTED), tl.constexpr(logit_rules.NOTHING)


class TritonLogits:
    """See LogitsKernels."""

    def process(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: RuleTables) -> Tensor:
        rows, vocab = logits.shape
        processed = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
        kernel: Any = _process[(rows, cdiv(vocab, BLOCK))]
        kernel(
            logits=logits,
            slots=slots,
            positions=positions,
            **vars(tables),
            processed=processed,
            pitch=logits.stride(0),
            vocab=vocab,
            masks=tables.allowed.shape[1],
            BLOCK=BLOCK,
            num_warps=WARPS,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=False,  # each product is rounded, as in the reference
        )
        return processed

    def count(self, slots: Tensor, tokens: Tensor, tables: RuleTables) -> None:
        kernel: Any = _count[(slots.shape[0],)]
        kernel(slots=slots, tokens=tokens, seen=tables.seen, records=tables.records, vocab=tables.seen.shape[1])


@triton.jit
def _process(
    logits, slots, positions, seen, allowed, records, processed, pitch, vocab, masks, BLOCK: tl.constexpr
):  # fmt: skip
    """A block of a row. What single tokens get in addition is stored over it, from the same logits."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    slot = tl.load(slots + row)
    logits += row * pitch
    processed += row * vocab
    token = first + tl.arange(0, BLOCK)
    if slot < 0:
        plain = tl.load(logits + token, mask=token < vocab).to(tl.float32)
        tl.store(processed + token, plain, mask=token < vocab)
    else:
        seen += slot * vocab
        allowed += slot * masks
        record = records + slot * RECORD
        _store(logits, token, token < vocab, 0.0, seen, allowed, record, processed)
        if tl.load(record + NUM_BIASED) > 0:
            entry = tl.arange(0, MOST_BIASED)
            biased = tl.load(record + BIASED + entry)
            here = (biased >= first) & (biased < first + BLOCK)
            bias = tl.load(record + BIAS + entry).to(tl.float32, bitcast=True)
            tl.debug_barrier()  # all threads have stored what is stored over now
            _store(logits, biased, here, bias, seen, allowed, record, processed)
        tl.debug_barrier()
        if tl.load(positions + row) - tl.load(record + FIRST_OUTPUT) < tl.load(record + MIN_TOKENS):
            _mask(tl.load(record + STOPS + tl.arange(0, MOST_STOPS)), first, processed, BLOCK)
        if tl.load(record + NUM_WORDS) > 0:
            _mask(_ends_of_words(record), first, processed, BLOCK)


@triton.jit
def _store(logits, token, here, bias, seen, allowed, record, processed):
    """Stores the processed logits of `token`, where `here`."""
    logit = tl.load(logits + token, mask=here, other=0.0).to(tl.float32) + bias
    state = tl.load(seen + token, mask=here, other=0).to(tl.int32)
    bits = tl.load(allowed + (token >> 5), mask=here, other=0)
    repetition = tl.load(record + REPETITION).to(tl.float32, bitcast=True)
    frequency = tl.load(record + FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(record + PRESENCE).to(tl.float32, bitcast=True)
    count = state & MOST_COUNTED
    repeated = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where(state != 0, repeated, logit)
    logit -= frequency * count.to(tl.float32)
    logit -= tl.where(count > 0, presence, 0.0)
    logit = tl.where(((bits >> (token & 31)) & 1) != 0, logit, float("-inf"))
    tl.store(processed + token, logit, mask=here)


@triton.jit
def _mask(tokens, first, processed, BLOCK: tl.constexpr):
    """Puts -inf in place of those `tokens` that the block has."""
    here = (tokens >= first) & (tokens < first + BLOCK)
    tl.store(processed + tokens, float("-inf"), mask=here)


@triton.jit
def _ends_of_words(record):
    """The last token of each word whose other tokens are the latest outputs; NOTHING for the others."""
    column = tl.arange(0, WORD)[None, :]
    begin = record + WORDS + tl.arange(0, MOST_WORDS)[:, None] * WORD
    word = tl.load(begin + column)
    latest = tl.load(record + LATEST + column)
    fits = (word == latest) | (word == NOTHING) | (column == NUM_LATEST)
    ends = tl.min(fits.to(tl.int32), 1) != 0
    last = tl.load(record + WORDS + tl.arange(0, MOST_WORDS) * WORD + NUM_LATEST)
    return tl.where(ends, last, NOTHING)


@triton.jit
def _count(slots, tokens, seen, records, vocab):
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    token = tl.load(tokens + row)
    if (slot >= 0) & (token < vocab):  # not NOT_FINITE: such a row ends
        entry = seen + slot * vocab + token
        state = tl.load(entry).to(tl.int32)
        grown = state + tl.where((state & MOST_COUNTED) < MOST_COUNTED, 1, 0)
        tl.store(entry, grown.to(tl.int16))
        column = tl.arange(0, WORD)
        latest = records + slot * RECORD + LATEST + column
        later = tl.load(latest + 1, mask=column < NUM_LATEST - 1, other=0)
        tl.debug_barrier()  # all threads have read
        tl.store(latest, tl.where(column == NUM_LATEST - 1, token.to(tl.int32), later), mask=column < NUM_LATEST)
