"""Compressed KV (DeepSeek-V4) with torch operations: how entries are made, and attention to a window and to entries.

One entry stands for `every` positions. It is the sum of their values, weighed by the softmax of their gates in each
dimension, normalised, and rotated as its first position is. Where entries overlap, each also takes what the positions
of the entry before offer it: the first half of their values and gates. The second half is for their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import Appended, AttentionBackend, Capabilities, GroupPlan, SharedKV
from tandem.cache.kernels.scoring import additive_mask
from tandem.cache.kernels.torch.attention import tree_masks
from tandem.cache.kernels.torch.latent_entries import LatentEntries
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout

ROWS_AT_ONCE = 128  # queries of one sequence whose scores are in memory together


def rotate_neighbours(x: Tensor, rotation: Rotation | None, *, back: bool = False) -> Tensor:
    """x [T, heads, D] with its last rotary_dim numbers rotated, each pair of neighbours as one. back: the other way."""
    if rotation is None:
        return x
    half = rotation.cos.shape[2] // 2
    cos, sin = rotation.cos[..., :half].float(), rotation.signed_sin[..., half:].float()
    still, turned = x[..., : -2 * half], x[..., -2 * half :].float()
    even, odd = turned[..., 0::2], turned[..., 1::2]
    if back:
        sin = -sin
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((still, pairs.to(x.dtype)), -1)


def compress(values: Tensor, gates: Tensor, norm: Tensor, eps: float) -> Tensor:
    """float32 [n, D], not rotated, of values and gates float32 [n, k, D]; a gate of -inf leaves its value out.

    norm: the weight of an RMS norm, [D].
    """
    pooled = (values * gates.softmax(1)).sum(1)
    return norm.float() * (pooled * torch.rsqrt(pooled.pow(2).mean(-1, keepdim=True) + eps))


@dataclass(frozen=True, eq=False)
class WindowPart:
    """n new tokens of a sequence and the m positions of their windows. rows: int64 [m], layer 0's entries in the pool;
    mask: float32 [n, m], 0 where a token sees a position, -inf elsewhere."""

    sequence: int
    tokens: slice
    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """append_rows: int64 [T], layer 0's entries that the new tokens fill."""

    append_rows: Tensor
    parts: tuple[WindowPart, ...]


class TorchSharedKernels(LatentEntries, AttentionBackend[SharedKV]):
    """Attention to a pool whose one plane is both K and V. Graph buffers are for kernels by token, which read the
    tables."""

    capabilities = Capabilities(step_graphs=True, verify_graphs=True)

    def __init__(self, pool: Tensor, scale: float, window: int) -> None:
        super().__init__(pool, pool.shape[5])
        self.scale = scale
        self.window = window

    def plan(self, tokens: TokenLayout, tables: PageTables) -> SharedPlan | None:
        """Plans attention; None where kernels by token attend."""
        if self.pool.is_cuda and tokens.trees is None:  # such forwards are by token, see TokenForward
            return None
        trees = tree_masks(tokens, tables, self.window)
        parts = [
            part
            for sequence in range(tokens.seq_lens.size)
            for part in self._parts(tokens, tables, sequence, trees.get(sequence))
        ]
        return SharedPlan(self.rows(tables.slot_mapping), tuple(parts))

    def run(self, plan: GroupPlan, layer: int, x: SharedKV, appended: Appended | None = None) -> Tensor:
        entries = rotate_neighbours(x.kv, plan.rotation)
        self._layers[layer].index_copy_(0, plan.own.append_rows, entries.squeeze(1))
        if appended is not None:
            appended(entries, None)
        q, output = rotate_neighbours(x.q, plan.rotation), torch.empty_like(x.q)
        for part in plan.own.parts:
            keys, mask = self.entries(layer, part.rows), part.mask
            extra = None if x.extra is None else x.extra[part.sequence]
            if extra is not None:
                keys = torch.cat((keys, extra.entries))
                seen = extra.seen[part.tokens.start - extra.first : part.tokens.stop - extra.first]
                mask = torch.cat((mask, mask_of(seen)), 1)
            output[part.tokens] = self._attend(q[part.tokens], keys, mask, x.sinks)
        return rotate_neighbours(output, plan.rotation, back=True)

    def _attend(self, q: Tensor, keys: Tensor, mask: Tensor, sinks: Tensor) -> Tensor:
        """o [n, heads, D] of q [n, heads, D] and keys [m, D]."""
        scores = (q.float() @ keys.float().T) * self.scale + mask[:, None]
        column = sinks.float().view(1, -1, 1).expand(*scores.shape[:2], 1)
        weights = torch.cat((scores, column), 2).softmax(2)[..., :-1]
        return (weights @ keys.float()).to(q.dtype)

    def _parts(
        self, tokens: TokenLayout, tables: PageTables, sequence: int, tree: Tensor | None
    ) -> Sequence[WindowPart]:
        """tree: the mask of the sequence's new tokens, which are nodes."""
        begin, end = tokens.qo_indptr[sequence : sequence + 2].tolist()
        slots, length = sequence_slots(tables, sequence, self.page_size), int(tables.kv_lens[sequence])
        visible = tokens.positions[begin:end] - (tokens.seq_lens[sequence] - length) + np.int32(1)
        if tree is not None:
            return [WindowPart(sequence, slice(begin, end), self.rows(slots), tree.to(self.pool.device))]
        parts = []
        for first in range(begin, end, ROWS_AT_ONCE):
            last = min(first + ROWS_AT_ONCE, end)
            seen = visible[first - begin : last - begin]
            low, high = max(int(seen[0]) - self.window, 0), int(seen[-1])
            mask = additive_mask(seen - np.int32(low), high - low, self.window).to(self.pool.device)
            parts.append(WindowPart(sequence, slice(first, last), self.rows(slots[low:high]), mask))
        return parts


def sequence_slots(tables: PageTables, sequence: int, page_size: int) -> np.ndarray:
    """int64: where the entries of a sequence are that stand in the tables, in order."""
    first, last = tables.kv_indptr[sequence : sequence + 2].tolist()
    pages = tables.kv_indices[first:last, None] * np.int64(page_size)
    return (pages + np.arange(page_size)).reshape(-1)[: tables.kv_lens[sequence]]


def mask_of(seen: Tensor) -> Tensor:
    """float32: 0 where bool `seen` is True, -inf elsewhere."""
    return torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill_(~seen, -torch.inf)
