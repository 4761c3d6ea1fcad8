"""Scores by index keys and the choice by them with torch operations: the CPU path, and the GPU's kernels' reference."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenChoose
from tandem.cache.kernels.index_keys import Choosers
from tandem.cache.kernels.scoring import additive_mask
from tandem.cache.kernels.torch.attention import tree_masks
from tandem.cache.kernels.torch.latent_entries import LatentEntries
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.rope import Rotation, rotate_last
from tandem.cache.plan.tables import PageTables, TokenLayout

SCORES_AT_ONCE = 1 << 24  # products of heads and keys that are in memory together


@dataclass(frozen=True, eq=False)
class ScorePart:
    """n tokens of one sequence that score its m positions. tokens: int64 [n]; rows: int64 [m], layer 0's keys in the
    pool; mask: float32 [n, m], 0 where a token sees a position, -inf elsewhere."""

    tokens: Tensor
    rows: Tensor
    mask: Tensor


@dataclass(frozen=True, eq=False)
class TorchIndexPlan:
    """append_rows: int64 [T], layer 0's entries that the new tokens fill."""

    append_rows: Tensor
    parts: tuple[ScorePart, ...]


class TorchIndexKernels(LatentEntries, AppendThenChoose):
    """See IndexBackend."""

    def __init__(self, pool: Tensor, rank: int, top_k: int, fp8: Fp8Rows | None = None) -> None:
        super().__init__(pool, rank, fp8)
        self._top_k = top_k

    def plan(self, tokens: TokenLayout, tables: PageTables) -> TorchIndexPlan:
        choosers, trees = Choosers.of(tokens, tables, self._top_k), tree_masks(tokens, tables, None)
        sequences = np.flatnonzero(choosers.sequences).tolist()
        parts = [self._part(tokens, tables, sequence, trees.get(sequence)) for sequence in sequences]
        return TorchIndexPlan(self.rows(tables.slot_mapping), tuple(parts))

    def append(
        self, layer: int, q: Tensor, still: Tensor, rotated: Tensor, rotation: Rotation | None, own: TorchIndexPlan
    ) -> tuple[Tensor, Tensor]:
        return rotate_last(q, self.rank, rotation), self.store(layer, still, rotated, rotation, own.append_rows)

    def choose(self, layer: int, q: Tensor, weights: Tensor, own: TorchIndexPlan) -> Tensor:
        found = [q.new_empty((0, self._top_k), dtype=torch.int32)]
        for part in own.parts:
            keys = self.entries(layer, part.rows)
            at_once = max(1, SCORES_AT_ONCE // (q.shape[1] * keys.shape[0]))
            for tokens, mask in zip(part.tokens.split(at_once), part.mask.split(at_once), strict=True):
                found.append(choose(score(q[tokens], weights[tokens], keys, mask), self._top_k))
        return torch.cat(found)

    def _part(self, tokens: TokenLayout, tables: PageTables, sequence: int, mask: Tensor | None) -> ScorePart:
        """mask: of nodes of a tree."""
        begin, end = tokens.qo_indptr[sequence : sequence + 2].tolist()
        first, last = tables.kv_indptr[sequence : sequence + 2].tolist()
        pages = tables.kv_indices[first:last, None] * np.int64(self.page_size)
        slots = (pages + np.arange(self.page_size)).reshape(-1)[: tables.kv_lens[sequence]]
        if mask is None:
            mask = additive_mask(tokens.positions[begin:end] + np.int32(1), slots.size)
        return ScorePart(self.index(np.arange(begin, end)), self.rows(slots), mask.to(self.pool.device))


def score(q: Tensor, weights: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """float32 [n, m]: Σ over heads of weight · max(q · key, 0), plus mask [n, m].

    q [n, heads, D], weights float32 [n, heads], keys [m, D].
    """
    products = (q.float().flatten(0, 1) @ keys.float().T).unflatten(0, q.shape[:2]).relu_()
    return torch.bmm(weights.unsqueeze(1), products).squeeze(1).add_(mask)


def choose(scores: Tensor, top_k: int) -> Tensor:
    """int32 [n, top_k]: in order, the positions of the highest of each row's scores (float32 [n, m]), of equal ones the
    first; then -1, where fewer are above -inf."""
    num_rows, num_scores = scores.shape
    least = scores.topk(min(top_k, num_scores), sorted=True).values[:, -1:]
    above, equal = scores > least, (scores == least) & (least > -torch.inf)
    room = top_k - above.sum(1, keepdim=True)
    taken = above | (equal & (equal.cumsum(1) <= room))
    places = torch.where(taken, taken.cumsum(1) - 1, top_k)  # the last column takes all that is left out
    positions = torch.arange(num_scores, dtype=torch.int32, device=scores.device).expand(num_rows, -1)
    chosen = positions.new_full((num_rows, top_k + 1), -1)
    return chosen.scatter_(1, places, positions)[:, :top_k]
