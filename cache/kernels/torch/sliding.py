"""Attention of sequences with a sliding window: K is stored before RoPE and rotated by its position in what is left."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from tandem.cache.kernels.scoring import Scoring, additive_mask
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.rope import Rotation

ReadSlots = Callable[[Int32Array], tuple[Tensor, Tensor]]
"""PageOperations.read_slots of one layer."""


@dataclass(frozen=True, eq=False)
class SlidingParts:
    """N sequences of a forward in one layer group: `sequences` (int64 [N], ascending) of the B.

    Tokens begins[i] … ends[i] - 1 (int32 [N] each) are the newest of the i-th; slots[bounds[i] : bounds[i + 1]] (int32)
    are those of all that it stores, in order. rotation: of 0, 1, …, as many as there can be; None without RoPE.
    """

    sequences: Int64Array
    begins: Int32Array
    ends: Int32Array
    bounds: Int32Array
    slots: Int32Array
    rotation: Rotation | None

    @property
    def num_tokens(self) -> int:
        return int((self.ends - self.begins).sum())

    def attend(self, output: Tensor, q: Tensor, read: ReadSlots, scoring: Scoring, sinks: Tensor | None) -> Tensor:
        """`output` [T, num_q_heads, head_dim] with their tokens filled in; q: of all tokens, not rotated."""
        bounds = pairwise(self.bounds.tolist())
        for begin, end, stored in zip(self.begins.tolist(), self.ends.tolist(), bounds, strict=True):
            keys, values = read(self.slots[slice(*stored)])
            output[begin:end] = self._attend_one(q[begin:end], keys, values, scoring, sinks)
        return output

    def _attend_one(self, q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, sinks: Tensor | None) -> Tensor:
        count, num_keys = q.shape[0], keys.shape[0]
        if self.rotation is not None:
            keys = self.rotation.between(0, num_keys).apply(keys)
            q = self.rotation.between(num_keys - count, num_keys).apply(q)
        visible = np.arange(num_keys - count, num_keys, dtype=np.int32) + 1
        mask = None if count == 1 else additive_mask(visible, num_keys).to(q.device, q.dtype)
        own, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
        return scoring.attend(own, keys, values, mask, sinks).squeeze(0).transpose(0, 1)
