"""The reference of LogitsKernels: plain torch, a row at a time."""

import torch
from torch import Tensor

from tandem.workers.kernels.base import RuleTables
from tandem.workers.sampling.logit_rules import (
    BIAS,
    BIASED,
    FIRST_OUTPUT,
    FREQUENCY,
    LATEST,
    MIN_TOKENS,
    MOST_COUNTED,
    MOST_STOPS,
    NOTHING,
    NUM_BIASED,
    NUM_LATEST,
    NUM_WORDS,
    PRESENCE,
    REPETITION,
    STOPS,
    WORDS,
)
from tandem.workers.sampling.sampling_params import MAX_BAD_WORD_TOKENS


class TorchLogits:
    """See LogitsKernels."""

    def process(self, logits: Tensor, slots: Tensor, positions: Tensor, tables: RuleTables) -> Tensor:
        processed = logits.to(torch.float32, copy=True)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                _process(processed[row], int(positions[row]), tables, slot)
        return processed

    def count(self, slots: Tensor, tokens: Tensor, tables: RuleTables) -> None:
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            token = int(tokens[row])
            if token >= tables.seen.shape[1]:
                continue  # NOT_FINITE: the row ends
            if tables.seen[slot, token] & MOST_COUNTED < MOST_COUNTED:
                tables.seen[slot, token] += 1
            latest = tables.records[slot, LATEST : LATEST + NUM_LATEST]
            latest.copy_(torch.cat((latest[1:], latest.new_tensor([token]))))


def _process(logits: Tensor, position: int, tables: RuleTables, slot: int) -> None:
    """Applies the rules to float32 [vocab], in place."""
    seen, record = tables.seen[slot], tables.records[slot]
    bits = tables.allowed[slot, :, None] >> torch.arange(32, dtype=torch.int32)
    logits.masked_fill_((bits & 1 == 0).reshape(-1)[: logits.shape[0]], -torch.inf)
    if position - int(record[FIRST_OUTPUT]) < int(record[MIN_TOKENS]):
        stops = record[STOPS : STOPS + MOST_STOPS]
        logits[stops[stops != NOTHING]] = -torch.inf
    words = record[WORDS:LATEST].view(-1, MAX_BAD_WORD_TOKENS)[: int(record[NUM_WORDS])]
    before = words[:, :NUM_LATEST]
    ends = ((before == record[LATEST : LATEST + NUM_LATEST]) | (before == NOTHING)).all(dim=1)
    logits[words[ends, NUM_LATEST]] = -torch.inf
    num_biased = int(record[NUM_BIASED])
    logits[record[BIASED : BIASED + num_biased]] += record[BIAS : BIAS + num_biased].view(torch.float32)
    presence, frequency, repetition = (
        record[field : field + 1].view(torch.float32) for field in (PRESENCE, FREQUENCY, REPETITION)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen != 0, repeated, logits))
    counts = seen & MOST_COUNTED
    logits -= frequency * counts
    logits -= presence * (counts > 0)
