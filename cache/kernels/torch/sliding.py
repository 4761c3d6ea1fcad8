"""Attention of sequences with a sliding window: K is stored before RoPE and rotated by its index in what is left.

What a sequence held before it began to slide was rotated by its position. Of that, sinks stand where they stood. The
rest is scored by q as it is rotated in the text: only the distance of two positions counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.scoring import Scoring, additive_mask
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.rope import Rotation, rotate_last

ReadSlots = Callable[[Int32Array], tuple[Tensor, Tensor]]
"""PageOperations.read_slots of one layer."""


@dataclass(frozen=True, eq=False)
class SlidingRows:
    """The standing of B sequences in a forward, int64 [B] each, in indices of page tables (see SlidingTable).

    sinks, holes: of each. turned_sinks, turned: sinks below the first, and others below the second, are stored rotated
    by their positions. indices, positions: of the newest token, among what is left and in the text. still: the row of
    the table of rotations that rotates nothing.
    """

    sinks: Int64Array
    holes: Int64Array
    turned_sinks: Int64Array
    turned: Int64Array
    indices: Int64Array
    positions: Int64Array
    still: int

    def packed(self, size: int) -> Int32Array:
        """int32 [6 · size], see DeviceTables.sliding; 0 in rows that are missing."""
        fields = self.sinks, self.holes, self.turned_sinks, self.turned, self.indices, self.positions
        packed = np.zeros((len(fields), size), np.int32)
        packed[:, : self.sinks.size] = fields
        return packed.reshape(-1)


@dataclass(frozen=True, eq=False)
class SlidingPart:
    """N sequences that attend at once, n tokens each over m keys each.

    tokens: int64 [N · n], rows of q; what a sequence has less is filled up with its last token, and its last key.
    slots: int32 [N · m]. mask: [N, 1, n, m], 0 or -inf; None: each token sees all keys. keys, queries: how K and q are
    rotated; None without RoPE. text: how q is rotated for the keys that are `late` (bool [N · m, 1, 1]), which were
    rotated by their positions and moved since; None where there are none.
    """

    size: int  # N
    tokens: Tensor
    slots: Int32Array
    mask: Tensor | None
    keys: Rotation | None = None
    queries: Rotation | None = None
    text: Rotation | None = None
    late: Tensor | None = None

    def attend(
        self, own: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, sinks: Tensor | None = None, still: int = 0
    ) -> Tensor:
        """o [N · n, num_q_heads, value_dim] of own [N · n, num_q_heads, head_dim], the q of `tokens`, over keys and
        values [N · m, num_kv_heads, …] of `slots`. still: so many numbers of a head stand before those that RoPE
        rotates."""
        if self.keys is not None and self.queries is not None:
            keys, moved = rotate_last(keys, still, self.keys), own
            own = rotate_last(own, still, self.queries)
            if self.text is not None and self.late is not None:  # two products as one: each key meets one q
                own = torch.cat((own, rotate_last(moved, still, self.text)), -1)
                keys = torch.cat((keys.masked_fill(self.late, 0), keys.masked_fill(~self.late, 0)), -1)
        own, keys, values = (x.unflatten(0, (self.size, -1)).transpose(1, 2) for x in (own, keys, values))
        o = scoring.attend(own, keys, values, None if self.mask is None else self.mask.to(own.dtype), sinks)
        return o.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class SlidingParts:
    """The sequences of a forward that slide, in one layer group: `sequences` (int64 [N], ascending) of the B.

    num_tokens: new tokens of all these sequences."""

    sequences: Int64Array
    num_tokens: int
    parts: tuple[SlidingPart, ...]

    def attend(self, output: Tensor, q: Tensor, read: ReadSlots, scoring: Scoring, sinks: Tensor | None) -> Tensor:
        """`output` [T, num_q_heads, head_dim] with their tokens filled in; q: of all tokens, not rotated."""
        for part in self.parts:
            output[part.tokens] = part.attend(q[part.tokens], *read(part.slots), scoring, sinks)
        return output

    def attend_latents(self, output: Tensor, q: Tensor, read: ReadSlots, scale: float, up: UpProjections) -> Tensor:
        """Attends like attend(), over latents: q [T, num_heads, key_dim + rotated], `output` [T, num_heads, value_dim].
        Absorbs `up`, since most sequences have one token."""
        key_dim, rank = up.heads.key_dim, up.weight.shape[2]
        for part in self.parts:
            own = q[part.tokens]
            wide = torch.cat((up.absorb(own[:, :, :key_dim]), own[:, :, key_dim:]), -1)
            weighted = part.attend(wide, *read(part.slots), Scoring(scale), still=rank)
            output[part.tokens] = up.values(weighted)
        return output


def plan_sliding_part(
    begins: Int64Array,
    counts: Int64Array,
    bounds: Int32Array,
    slots: Int32Array,
    ways: SlidingRows,
    rotation: Rotation | None,
    device: torch.device,
    firsts: Int64Array | None = None,
) -> SlidingPart:
    """begins, counts: int64 [N], the first token of each sequence and how many it has. bounds, slots: see
    PageLookUp.sliding_slots. ways: of the sequences, when these tokens are stored. rotation: the whole table's. firsts:
    int64 [N, longest of counts], how many of the stored entries stand before those that a token sees; None: it sees
    all."""
    size, stored = counts.size, np.diff(bounds).astype(np.int64)
    unseen = np.zeros_like(stored) if firsts is None else firsts[:, 0]
    widest, longest = int((stored - unseen).max()), int(counts.max())
    tokens = np.minimum(np.arange(longest), counts[:, None] - 1)
    keys = np.minimum(unseen[:, None] + np.arange(widest), stored[:, None] - 1)
    mask = _mask((stored - counts - unseen)[:, None] + tokens + 1, widest, firsts)
    mask = None if mask is None else mask.view(size, 1, longest, widest).to(device)
    rows = [(begins[:, None] + tokens).reshape(-1)]
    padded = slots[bounds[:-1, None] + keys].reshape(-1)
    if rotation is None:
        (own,) = upload(rows, device)
        return SlidingPart(size, own, padded, mask)
    is_sink = keys < ways.sinks[:, None]
    turned = keys < np.where(is_sink, ways.turned_sinks[:, None], (ways.turned - ways.holes)[:, None])
    back = counts[:, None] - 1 - tokens
    rows += [np.where(turned, ways.still, keys).reshape(-1), (ways.indices[:, None] - back).reshape(-1)]
    late = turned & ~is_sink & (ways.indices != ways.positions)[:, None]  # else they stand where they stood
    if not late.any():
        own, of_keys, of_queries = upload(rows, device)
        return SlidingPart(
            size, own, padded, mask, Rotation(rotation.table, of_keys), Rotation(rotation.table, of_queries)
        )
    rows += [np.maximum(ways.positions[:, None] - back, 0).reshape(-1), late.reshape(-1).astype(np.int64)]
    own, *of, are_late = upload(rows, device)
    of_keys, of_queries, of_text = (Rotation(rotation.table, one) for one in of)
    return SlidingPart(size, own, padded, mask, of_keys, of_queries, of_text, are_late.bool()[:, None, None])


def _mask(visible: Int64Array, widest: int, firsts: Int64Array | None) -> Tensor | None:
    """float32 [N · n, widest]: 0 at the first visible[i, t] keys (int64 [N, n]), but for those that stand before
    firsts[i, t], counted from firsts[i, 0]; -inf elsewhere. None: all are 0."""
    hides = firsts is not None and int((firsts - firsts[:, :1]).max()) > 0
    if int(visible.min()) >= widest and not hides:
        return None
    mask = additive_mask(visible.reshape(-1).astype(np.int32), widest)
    if firsts is not None and hides:
        before = np.arange(widest) < (firsts - firsts[:, :1]).reshape(-1, 1)
        mask = mask.masked_fill(torch.from_numpy(before), -torch.inf)
    return mask
