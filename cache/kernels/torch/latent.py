"""Latent attention over a paged pool with torch operations: the CPU path, and the reference of the GPU's kernels."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.backend import LatentAppendThenAttend
from tandem.cache.kernels.index_keys import Choosers
from tandem.cache.kernels.scoring import Scoring, additive_mask
from tandem.cache.kernels.torch.attention import tree_masks
from tandem.cache.kernels.torch.latent_entries import LatentEntries
from tandem.cache.plan.arrays import ragged_range
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.latent import LatentHeads, UpProjections, absorbed_is_cheaper
from tandem.cache.plan.rope import Rotation, rotate_last
from tandem.cache.plan.tables import PageTables, TokenLayout

ENTRIES_AT_ONCE = 1 << 16  # chosen ones that are gathered together


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
class ChosenPart:
    """n tokens that attend to chosen positions. tokens, firsts: int64 [n], and kv_indices: see Choosers."""

    tokens: Tensor
    firsts: Tensor
    kv_indices: Tensor


@dataclass(frozen=True, eq=False)
class TorchLatentPlan:
    """append_rows: int64 [T], layer 0's entries that the new tokens fill."""

    append_rows: Tensor
    parts: tuple[LatentPart, ...]
    chosen: ChosenPart | None


class TorchLatentKernels(LatentEntries, LatentAppendThenAttend):
    """See LatentBackend."""

    def __init__(
        self,
        pool: Tensor,
        scale: float,
        rank: int,
        heads: LatentHeads,
        top_k: int | None = None,
        fp8: Fp8Rows | None = None,
    ) -> None:
        super().__init__(pool, rank, fp8)
        self._heads = heads
        self.scale, self._scoring = scale, Scoring(scale)
        self._top_k = top_k

    def plan(self, tokens: TokenLayout, tables: PageTables) -> TorchLatentPlan:
        appends = np.diff(tokens.qo_indptr)
        absorbed = absorbed_is_cheaper(appends, tables.kv_lens, self.rank, self.entry_size - self.rank, self._heads)
        choosers = Choosers.of(tokens, tables, self._top_k)
        single, trees = tokens.single & ~choosers.sequences, tree_masks(tokens, tables, None)
        parts = [self._part(tokens, tables, np.flatnonzero(single), absorbed=True)] if single.any() else []
        for sequence in np.flatnonzero(~single & ~choosers.sequences):
            part = self._part(tokens, tables, np.array([sequence]), bool(absorbed[sequence]))
            mask = trees.get(int(sequence))
            if mask is not None:
                part = replace(part, mask=mask[None, :, None].to(self.pool.device))
            parts.append(part)
        chosen = None
        if choosers.tokens.size:
            chosen = ChosenPart(*map(self.index, (choosers.tokens, choosers.firsts, tables.kv_indices)))
        return TorchLatentPlan(self.rows(tables.slot_mapping), tuple(parts), chosen)

    def append(
        self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, rotation: Rotation | None, own: TorchLatentPlan
    ) -> tuple[Tensor, Tensor]:
        return rotate_last(q, self._heads.key_dim, rotation), self.store(
            layer, latents, keys, rotation, own.append_rows
        )

    def attend(
        self, layer: int, q: Tensor, own: TorchLatentPlan, up: UpProjections, chosen: Tensor | None = None
    ) -> Tensor:
        output = q.new_empty((*q.shape[:2], self._heads.value_dim))
        for part in own.parts:
            entries = self.entries(layer, part.rows)
            attend = self._attend_absorbed if part.absorbed else self._attend_expanded
            output[part.tokens] = attend(part, q.index_select(0, part.tokens), entries, up)
        if own.chosen is not None:
            assert chosen is not None  # whoever plans for choosers gives what they have chosen
            output[own.chosen.tokens] = self._attend_chosen(layer, own.chosen, q, up, chosen)
        return output

    def _attend_chosen(self, layer: int, part: ChosenPart, q: Tensor, up: UpProjections, chosen: Tensor) -> Tensor:
        at_once = max(1, ENTRIES_AT_ONCE // chosen.shape[1])
        weighted = []
        for tokens, firsts, its in zip(*(x.split(at_once) for x in (part.tokens, part.firsts, chosen)), strict=True):
            rows = self.rows_of(its.clamp(min=0), firsts, part.kv_indices)
            entries = self.entries(layer, rows.flatten()).view(*rows.shape, -1)
            wide = self._absorb(q.index_select(0, tokens), up)
            weighted.append(attend_chosen(wide, entries, its, self.rank, self._scoring.scale))
        return up.values(torch.cat(weighted).to(q.dtype))

    def _absorb(self, q: Tensor, up: UpProjections) -> Tensor:
        """Returns [n, heads, rank + rotated]. Its product with an entry equals the product of q with the entry's K."""
        still = self._heads.key_dim
        return torch.cat((up.absorb(q[:, :, :still]), q[:, :, still:]), 2)

    def _attend_absorbed(self, part: LatentPart, q: Tensor, entries: Tensor, up: UpProjections) -> Tensor:
        batch, count, num_keys = part.shape
        wide = self._absorb(q, up).float()
        rows = entries.view(batch, num_keys, -1).float()
        products = wide.view(batch, -1, self.entry_size).bmm(rows.transpose(1, 2))
        weights = self._scoring.weigh(products.view(batch, count, -1, num_keys), part.mask, None)
        weighted = weights.view(batch, -1, num_keys).bmm(rows[:, :, : self.rank])
        return up.values(weighted.view(batch * count, -1, self.rank).to(q.dtype))

    def _attend_expanded(self, part: LatentPart, q: Tensor, entries: Tensor, up: UpProjections) -> Tensor:
        """Attends to expanded K and V. part: of one sequence."""
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
        indexes = tables.kv_indptr[sequences][:, None] + positions // self.page_size
        slots = tables.kv_indices[indexes] * np.int64(self.page_size) + positions % self.page_size
        visible = (lengths[:, None] - count + 1 + np.arange(count, dtype=np.int32)).reshape(-1)
        mask = None
        if int(visible.min()) < num_keys:
            mask = additive_mask(visible, num_keys).view(sequences.size, count, 1, num_keys).to(self.pool.device)
        own = ragged_range(tokens.qo_indptr[sequences], np.full(sequences.size, count, np.int32))
        rows = self.rows(slots.reshape(-1))
        return LatentPart(self.index(own), rows, (sequences.size, count, num_keys), mask, absorbed)


def attend_chosen(q: Tensor, entries: Tensor, chosen: Tensor, rank: int, scale: float) -> Tensor:
    """float32 [n, heads, rank]: weighted sums of the latents of each row's entries, absorbed.

    q [n, heads, rank + rotated], entries [n, k, rank + rotated], chosen [n, k]: negative where an entry is none of the
    row's.
    """
    values = entries.float()
    scores = torch.bmm(q.float(), values.transpose(1, 2)).mul_(scale)
    weights = scores.masked_fill_((chosen < 0)[:, None], -torch.inf).softmax(-1)
    return torch.bmm(weights, values[:, :, :rank])
