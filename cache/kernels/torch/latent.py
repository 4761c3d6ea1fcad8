"""Latent attention over a paged pool with torch operations: the CPU path, and the reference of the GPU's kernels."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.backend import LatentAppendThenAttend
from tandem.cache.kernels.scoring import Scoring, additive_mask
from tandem.cache.kernels.torch.attention import tree_masks
from tandem.cache.plan.arrays import Int32Array, ragged_range
from tandem.cache.plan.latent import LatentHeads, UpProjections, absorbed_is_cheaper
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout


@dataclass(frozen=True, eq=False)
class LatentPart:
    """B sequences with n new tokens each, which attend to m positions.

    tokens: int64 [B · n], theirs among the packed ones. rows: int64 [B · m], layer 0's entries in the pool. mask: 0 or
    -inf, [B, n, 1, m]; None where all is seen.
    """

    tokens: Tensor
    rows: Tensor
    shape: tuple[int, int, int]  # B, n, m
    mask: Tensor | None
    absorbed: bool


@dataclass(frozen=True, eq=False)
class TorchLatentPlan:
    """append_rows: int64 [T], layer 0's entries that the new tokens fill."""

    append_rows: Tensor
    parts: tuple[LatentPart, ...]


class TorchLatentKernels(LatentAppendThenAttend):
    """See LatentBackend. Row ids are those of layer 0; a layer's entries are a view of the pool that begins there."""

    def __init__(self, pool: Tensor, scale: float, rank: int, heads: LatentHeads) -> None:
        super().__init__(pool)
        _, layers, _, _, self._page_size, self._entry_size = pool.shape
        self._pool = pool
        self._rank = rank
        self._heads = heads
        self._scoring = Scoring(scale)
        self._page_rows = layers * self._page_size
        entries = pool.view(-1, self._entry_size)
        self._entries = [entries[layer * self._page_size :] for layer in range(layers)]

    def plan(self, tokens: TokenLayout, tables: PageTables, buffers: Any = None) -> TorchLatentPlan:
        appends = np.diff(tokens.qo_indptr)
        absorbed = absorbed_is_cheaper(appends, tables.kv_lens, self._rank, self._entry_size - self._rank, self._heads)
        single, trees = tokens.single, tree_masks(tokens, tables, None)
        parts = [self._part(tokens, tables, np.flatnonzero(single), absorbed=True)] if single.any() else []
        for sequence in np.flatnonzero(~single):
            part = self._part(tokens, tables, np.array([sequence]), bool(absorbed[sequence]))
            mask = trees.get(int(sequence))
            if mask is not None:
                part = replace(part, mask=mask[None, :, None].to(self._pool.device))
            parts.append(part)
        return TorchLatentPlan(self._index(self._rows(tables.slot_mapping)), tuple(parts))

    def append(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, rotation: Rotation | None, own: TorchLatentPlan
    ) -> tuple[Tensor, Tensor]:
        keys = keys.unsqueeze(1)
        if rotation is not None:
            still = self._heads.key_dim
            q = torch.cat((q[:, :, :still], rotation.apply(q[:, :, still:])), 2)
            keys = rotation.apply(keys)
        entries = torch.cat((latents.unsqueeze(1), keys), 2)
        self._entries[layer].index_copy_(0, own.append_rows, entries.squeeze(1))
        return q, entries

    def attend(self, layer: int, q: Tensor, own: TorchLatentPlan, up: UpProjections) -> Tensor:
        output = q.new_empty((*q.shape[:2], self._heads.value_dim))
        for part in own.parts:
            entries = self._entries[layer].index_select(0, part.rows)
            attend = self._attend_absorbed if part.absorbed else self._attend_expanded
            output[part.tokens] = attend(part, q.index_select(0, part.tokens), entries, up)
        return output

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        entries = self._entries[layer].index_select(0, self._index(self._rows(slots))).unsqueeze(1)
        return entries, entries[:, :, : self._rank]

    def _attend_absorbed(self, part: LatentPart, q: Tensor, entries: Tensor, up: UpProjections) -> Tensor:
        batch, count, num_keys = part.shape
        still = self._heads.key_dim
        wide = torch.cat((up.absorb(q[:, :, :still]), q[:, :, still:]), 2).float()
        rows = entries.view(batch, num_keys, -1).float()
        products = wide.view(batch, -1, self._entry_size).bmm(rows.transpose(1, 2))
        weights = self._scoring.weigh(products.view(batch, count, -1, num_keys), part.mask, None)
        weighted = weights.view(batch, -1, num_keys).bmm(rows[:, :, : self._rank])
        return up.values(weighted.view(batch * count, -1, self._rank).to(q.dtype))

    def _attend_expanded(self, part: LatentPart, q: Tensor, entries: Tensor, up: UpProjections) -> Tensor:
        """part is of one sequence."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, *up.keys_and_values(entries)))
        mask = None if part.mask is None else part.mask.view(part.shape[1:]).to(q.dtype)
        return self._scoring.attend(q, k, v, mask, None).squeeze(0).transpose(0, 1)

    def _part(
        self, tokens: TokenLayout, tables: PageTables, sequences: NDArray[np.int64], absorbed: bool
    ) -> LatentPart:
        """sequences: int64 [B], with as many new tokens each. Short ones read their last position again, masked."""
        lengths = tables.kv_lens[sequences]
        count, num_keys = int(np.diff(tokens.qo_indptr)[sequences[0]]), int(lengths.max())
        positions = np.minimum(np.arange(num_keys), lengths[:, None] - 1)
        indexes = tables.kv_indptr[sequences][:, None] + positions // self._page_size
        slots = tables.kv_indices[indexes] * np.int64(self._page_size) + positions % self._page_size
        visible = (lengths[:, None] - count + 1 + np.arange(count, dtype=np.int32)).reshape(-1)
        mask = None
        if int(visible.min()) < num_keys:
            mask = additive_mask(visible, num_keys).view(sequences.size, count, 1, num_keys).to(self._pool.device)
        own = ragged_range(tokens.qo_indptr[sequences], np.full(sequences.size, count, np.int32))
        rows = self._index(self._rows(slots.reshape(-1)))
        return LatentPart(self._index(own), rows, (sequences.size, count, num_keys), mask, absorbed)

    def _rows(self, slots: NDArray[np.integer]) -> NDArray[np.int64]:
        pages, offsets = np.divmod(slots.astype(np.int64), self._page_size)
        return pages * self._page_rows + offsets

    def _index(self, ids: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self._pool.device)
