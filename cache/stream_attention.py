"""Attention of sequences with a sliding window: K is stored before RoPE and rotated by its place in what is left."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.scoring import Scoring, additive_mask
from tandem.cache.position_map import Int32Array
from tandem.cache.rope import Rotation

ReadSlots = Callable[[Int32Array], tuple[Tensor, Tensor]]
"""Kernels.read_slots of one layer."""


@dataclass(frozen=True, eq=False)
class StreamPart:
    """One sequence of a forward in one layer group: tokens begin … end - 1 are its newest.

    slots: int32 [n], of all that it stores, in order. rotation: of n places; None without RoPE.
    """

    begin: int
    end: int
    slots: Int32Array
    rotation: Rotation | None

    def attend(self, q: Tensor, read: ReadSlots, scoring: Scoring, sinks: Tensor | None) -> Tensor:
        """o [end - begin, num_q_heads, head_dim] of all tokens' q, not rotated."""
        keys, values = read(self.slots)
        own, count = q[self.begin : self.end], self.end - self.begin
        if self.rotation is not None:
            keys = self.rotation.apply(keys)
            last = Rotation(self.rotation.cos[-count:], self.rotation.signed_sin[-count:])
            own = last.apply(own)
        num_keys = self.slots.size
        visible = np.arange(num_keys - count, num_keys, dtype=np.int32) + 1
        mask = None if count == 1 else additive_mask(visible, num_keys).to(q.device, q.dtype)
        own, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (own, keys, values))
        return scoring.attend(own, keys, values, mask, sinks).squeeze(0).transpose(0, 1)


def attend_streams(
    output: Tensor, parts: Sequence[StreamPart], q: Tensor, read: ReadSlots, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """`output` [T, num_q_heads, head_dim] with the tokens of `parts` filled in."""
    for part in parts:
        output[part.begin : part.end] = part.attend(q, read, scoring, sinks)
    return output


def unrotated(rotation: Rotation, tokens: Tensor) -> Rotation:
    """The rotation with nothing done to `tokens` (bool [T])."""
    cos, sin = rotation.cos.clone(), rotation.signed_sin.clone()
    cos[tokens], sin[tokens] = 1, 0
    return Rotation(cos, sin)


def no_output(q: Tensor) -> Tensor:
    """Room for an output whose tokens are all to be filled in."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)
