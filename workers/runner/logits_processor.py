"""The states of rows whose logits are processed, on the device, from a row's first step to its last."""

import weakref
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.workers.kernels.base import RuleTables
from tandem.workers.kernels.choice import choose_logits_kernels
from tandem.workers.sampling.logit_rules import RECORD, LogitRules

FEWEST_SLOTS = 8
NO_SLOT = -1


class ProcessedLogits(NamedTuple):
    """logits: float32 [n, vocab]. slots: int64 [n], of the rows' states. Both are on the device."""

    logits: Tensor
    slots: Tensor


class LogitsProcessor:
    """A state lies in a slot of tables that grow when they are full: 2 bytes a token of the vocabulary and 17 KiB.

    A row's slot is free once nobody has its LogitRules any more. All work is queued on the current stream of one
    thread: the next state in a slot is written after what used the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels = choose_logits_kernels(device)
        self._tables: RuleTables | None = None
        self._slots: weakref.WeakKeyDictionary[LogitRules, int] = weakref.WeakKeyDictionary()
        self._free: list[int] = []
        self._rules_before: NDArray[np.object_] | None = None  # most steps have the rows of the one before
        self._slots_before = self._guided_before = np.zeros(0, np.int64)

    @torch.inference_mode()
    def process(
        self, logits: Tensor, rules: NDArray[np.object_], positions: Int64Array, masks: Int32Array | None = None
    ) -> ProcessedLogits:
        """logits [n, vocab], on the device. rules, positions: [n], of the SampleBatch and its tokens. masks: of
        guided rows, see masks_of()."""
        if rules is not self._rules_before:
            slots = [NO_SLOT if one is None else self._slot(one, logits.shape[1]) for one in rules]
            guided = [slot for one, slot in zip(rules, slots, strict=True) if one is not None and one.guided]
            self._slots_before, self._guided_before = np.array(slots, np.int64), np.array(guided, np.int64)
            self._rules_before = rules
        tables = self._tables
        assert tables is not None, "some row has rules"
        on_device, where = upload([self._slots_before, positions], self._device)
        if masks is not None:
            self._take_masks(masks, tables)
        return ProcessedLogits(self._kernels.process(logits, on_device, where, tables), on_device)

    @torch.inference_mode()
    def count(self, processed: ProcessedLogits, tokens: Tensor) -> None:
        """tokens int64 [at least n], on the device, were sampled from the processed logits."""
        assert self._tables is not None
        self._kernels.count(processed.slots, tokens, self._tables)

    def _take_masks(self, masks: Int32Array, tables: RuleTables) -> None:
        """Replaces the masks of the previous guided rows."""
        slots, words = upload([self._guided_before, masks.reshape(-1)], self._device)
        tables.allowed.index_copy_(0, slots, words.view(masks.shape))

    def _slot(self, rules: LogitRules, vocab: int) -> int:
        slot = self._slots.get(rules)
        if slot is None:
            if not self._free:
                self._make_room(vocab)
            slot = self._slots[rules] = self._free.pop()
            weakref.finalize(rules, self._free.append, slot).atexit = False
            self._begin(slot, rules, vocab)
        return slot

    def _begin(self, slot: int, rules: LogitRules, vocab: int) -> None:
        tables = self._tables
        assert tables is not None
        tokens, seen = rules.seen()
        where, entries, allowed, record = upload([tokens, seen, rules.allowed(vocab), rules.record()], self._device)
        tables.seen[slot].zero_().index_copy_(0, where, entries)
        tables.allowed[slot] = allowed
        tables.records[slot] = record

    def _make_room(self, vocab: int) -> None:
        before = self._tables
        used = 0 if before is None else before.seen.shape[0]
        slots = max(FEWEST_SLOTS, 2 * used)
        widths = ((vocab, torch.int16), (-(-vocab // 32), torch.int32), (RECORD, torch.int32))
        grown = [torch.zeros((slots, width), dtype=dtype, device=self._device) for width, dtype in widths]
        if before is not None:
            for new, old in zip(grown, vars(before).values(), strict=True):
                new[:used] = old
        self._tables = RuleTables(*grown)
        self._free += range(slots - 1, used - 1, -1)
