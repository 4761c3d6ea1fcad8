"""Attention over a paged pool with torch operations: a forward is cut into parts, each for one operation.

Decodes gather the pages of many sequences at once; fresh prompts attend to the K and V that were just computed; later
chunks of a prompt gather their own pages. `spans` is one layer of a pool as rows of page_size · head_dim elements, its
K first; the row of (page, K or V, head) is (page · layers · 2 + K or V) · num_kv_heads + head.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.scoring import Scoring, additive_mask
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.spans import span_of
from tandem.cache.plan.tables import PageTables, TokenLayout
from tandem.cache.plan.token_tree import unpack_masks

PADDED_PAGES_ALLOWED = 64  # up to here, padding costs less than a second part


@dataclass(frozen=True, eq=False)
class AttentionPart(ABC):
    """Some tokens of a forward: integers [n], or a slice of neighbours."""

    tokens: Tensor | slice

    def take(self, q: Tensor) -> Tensor:
        return q[self.tokens] if isinstance(self.tokens, slice) else q.index_select(0, self.tokens)

    @abstractmethod
    def attend(
        self, spans: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """Returns the part's o [n, num_q_heads, head_dim] from the part's q and all tokens' k and v; None: they
        are in the pages alone.

        `scoring` has the window given to plan_attention.
        """


@dataclass(frozen=True, eq=False)
class PageGather:
    """Copies the pages of several sequences side by side. rows: int32 [2 · sequences · heads · pages each]."""

    rows: Tensor
    shape: tuple[int, int, int, int]  # 2, sequences, heads, positions gathered
    num_keys: int  # the positions worth keeping

    def __call__(self, spans: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [sequences, heads, num_keys, head_dim], in q's dtype."""
        both = spans.index_select(0, self.rows).view(*self.shape, q.shape[2]).to(q.dtype)
        if self.num_keys < self.shape[3]:
            both = both.narrow(3, 0, self.num_keys)
        k, v = both.unbind(0)
        return k, v


@dataclass(frozen=True, eq=False)
class DecodePart(AttentionPart):
    """Sequences with one new token each.

    mask: float32 [n, 1, 1, num_keys], 0 or -inf; None where all see all num_keys.
    """

    tokens: Tensor
    gather: PageGather
    mask: Tensor | None

    def attend_in_part(self, spans: Tensor, q: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """o [n, Hq, D] and the log-sum-exp of scores [n, Hq], both float32."""
        keys, values = (x.float() for x in self.gather(spans, q))
        products = q.float().unflatten(1, (keys.shape[1], -1)) @ keys.transpose(2, 3)
        o, lse = scoring.attend_in_part(products, values, self.mask)
        return o.flatten(1, 2), lse.flatten(1, 2)

    def attend(
        self, spans: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        keys, values = self.gather(spans, q)
        batch, heads, num_keys, head_dim = keys.shape
        if batch == 1 and q.dtype == torch.float32:
            return scoring.attend(q.unsqueeze(2), keys, values, self.mask, sinks).squeeze(2)
        # For single queries of many sequences two batched products in float32 beat the fused kernel: by a quarter in
        # float32, several times in half precision.
        grouped = q.reshape(batch * heads, -1, head_dim).float()
        keys = keys.reshape(batch * heads, num_keys, head_dim).float()
        values = values.reshape(batch * heads, num_keys, head_dim).float()
        products = grouped.bmm(keys.transpose(1, 2)).view(batch, -1, 1, num_keys)
        weights = scoring.weigh(products, self.mask, sinks).reshape(batch * heads, -1, num_keys)
        return weights.bmm(values).view(batch, -1, head_dim).to(q.dtype)


@dataclass(frozen=True, eq=False)
class FreshPart(AttentionPart):
    """Neighbouring sequences with nothing cached and `length` new tokens each. plan_gather: of all that they store."""

    length: int
    plan_gather: Callable[[], PageGather]

    @cached_property
    def gather(self) -> PageGather:
        return self.plan_gather()

    def attend(
        self, spans: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        if k is None or v is None:
            keys, values = self.gather(spans, q)
        else:
            keys, values = (self.take(x).unflatten(0, (-1, self.length)).transpose(1, 2) for x in (k, v))
        o = scoring.attend_causally(q.unflatten(0, (-1, self.length)).transpose(1, 2), keys, values, sinks)
        return o.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class ChunkPart(AttentionPart):
    """n tokens of one sequence after cached ones. mask: [n, num_keys], 0 or -inf; None where all see all num_keys."""

    gather: PageGather
    mask: Tensor | None

    def attend_in_part(self, spans: Tensor, q: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """o [n, Hq, D] and the log-sum-exp of scores [n, Hq], both float32."""
        keys, values = (x.squeeze(0).unsqueeze(1).float() for x in self.gather(spans, q))  # [Hkv, 1, m, D]
        grouped = q.float().unflatten(1, (keys.shape[0], -1)).permute(1, 2, 0, 3)
        o, lse = scoring.attend_in_part(grouped @ keys.transpose(2, 3), values, self.mask)
        return o.flatten(0, 1).transpose(0, 1), lse.flatten(0, 1).transpose(0, 1)

    def attend(
        self, spans: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        keys, values = self.gather(spans, q)
        q = q.transpose(0, 1).unsqueeze(0)
        o = scoring.attend(q, keys, values, self.mask, sinks)
        return o.squeeze(0).transpose(0, 1)


StoredParts = tuple[DecodePart | ChunkPart, ...]


def plan_attention(
    tokens: TokenLayout, tables: PageTables, pool: Tensor, window: int | None, dtype: torch.dtype
) -> tuple[AttentionPart, ...]:
    """Parts that cover every token of the forward once. pool gives shapes; it is not read. dtype: of q."""
    planner = _Planner(tokens.qo_indptr[:-1], tables, pool, window, dtype)
    if tokens.positions.size == planner.rows.tokens.size and tokens.trees is None:
        return tuple(planner.decodes(planner.rows))
    single = tokens.single
    decodes = planner.decodes(planner.rows.take(single)) if single.any() else []
    return (*decodes, *plan_prompts(tokens, tables, pool, window, dtype))


def plan_decodes(tables: PageTables, pool: Tensor, dtype: torch.dtype) -> tuple[DecodePart, ...]:
    """Parts that cover sequences with one new token each, which are all; without a window. dtype: of q."""
    planner = _Planner(np.arange(tables.kv_lens.size, dtype=np.int32), tables, pool, None, dtype)
    return tuple(planner.decodes(planner.rows))


def plan_prompts(
    tokens: TokenLayout, tables: PageTables, pool: Tensor, window: int | None, dtype: torch.dtype
) -> tuple[AttentionPart, ...]:
    """Returns parts that cover the tokens of trees, and of sequences with more than one new token."""
    planner = _Planner(tokens.qo_indptr[:-1], tables, pool, window, dtype)
    rows = planner.rows
    appends = np.diff(tokens.qo_indptr)
    single = tokens.single
    fresh = ~single & (appends == tables.kv_lens)
    masks = tree_masks(tokens, tables, window)
    fresh[list(masks)] = False
    parts: list[AttentionPart] = []
    if fresh.any():
        parts += planner.fresh(np.flatnonzero(fresh))
    for sequence in np.flatnonzero(~single & ~fresh):
        row, append = rows.take(slice(sequence, sequence + 1)), int(appends[sequence])
        parts.append(planner.chunk(row, append, masks.get(int(sequence))))
    return tuple(parts)


def plan_stored(
    tokens: TokenLayout, tables: PageTables, pool: Tensor, window: int | None, dtype: torch.dtype, *, causal: bool
) -> StoredParts:
    """Parts that cover every token once and take K and V from pages alone; else as plan_attention, without trees. Not
    causal: each token sees all that the tables have of its sequence."""
    planner = _Planner(tokens.qo_indptr[:-1], tables, pool, window, dtype)
    rows, appends, single = planner.rows, np.diff(tokens.qo_indptr), tokens.single
    parts: list[DecodePart | ChunkPart] = []
    for length in np.unique(rows.lengths[single]):  # slots after the end of a sequence may hold anything
        parts += planner.decodes(rows.take(single & (rows.lengths == length)))
    for sequence in np.flatnonzero(~single):
        row, append = rows.take(slice(sequence, sequence + 1)), int(appends[sequence])
        parts.append(planner.chunk(row, append, None, causal=causal))
    return tuple(parts)


def tree_masks(tokens: TokenLayout, tables: PageTables, window: int | None) -> dict[int, Tensor]:
    """Returns by sequence a mask, float32 [new nodes, positions]: 0 where a node sees a position of the tables, -inf
    elsewhere."""
    trees = tokens.trees
    if trees is None:
        return {}
    ends = np.cumsum(trees.counts)[:-1]
    masks, depths = np.split(trees.masks_in(window), ends), np.split(trees.depths, ends)
    found = {}
    for sequence, size, mask, depth in zip(trees.sequences, trees.sizes, masks, depths, strict=True):
        base = int(tables.kv_lens[sequence] - size)
        firsts = span_of(window).first_needed(base + depth)[:, None]
        seen = np.concatenate((np.arange(base) >= firsts, unpack_masks(mask, size)), 1)
        found[int(sequence)] = torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf)))
    return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some sequences. int32 [n] of each: its first token, how many positions, where its pages begin in kv_indices, and
    how many these are."""

    tokens: Int32Array
    lengths: Int32Array
    begins: Int32Array
    counts: Int32Array

    def take(self, which: NDArray[np.bool_] | slice) -> "_Rows":
        return _Rows(self.tokens[which], self.lengths[which], self.begins[which], self.counts[which])


class _Planner:
    def __init__(
        self, tokens: Int32Array, tables: PageTables, pool: Tensor, window: int | None, dtype: torch.dtype
    ) -> None:
        """tokens: int32 [B], the first of each sequence of `tables`."""
        begins = tables.kv_indptr[:-1]
        self.rows = _Rows(tokens, tables.kv_lens, begins, tables.kv_indptr[1:] - begins)
        self._kv_indices = tables.kv_indices
        self._pool = pool
        self._window = window
        self._dtype = dtype
        self._device = pool.device

    def decodes(self, rows: _Rows) -> list[DecodePart]:
        """One part, or one for each power of two of pages where that much padding would be read."""
        widest, pages = int(rows.counts.max()), int(rows.counts.sum())
        if rows.counts.size * widest - pages <= max(PADDED_PAGES_ALLOWED, pages):
            return [self._decode(rows, widest)]
        sizes = np.ceil(np.log2(rows.counts))
        parts = [rows.take(sizes == size) for size in np.unique(sizes)]
        return [self._decode(part, int(part.counts.max())) for part in parts]

    def fresh(self, sequences: NDArray[np.int64]) -> list[FreshPart]:
        """Neighbours of one length become one part."""
        rows = self.rows
        cuts = np.flatnonzero((np.diff(sequences) != 1) | (np.diff(rows.lengths[sequences]) != 0)) + 1
        parts = []
        for run in np.split(sequences, cuts):
            own = rows.take(slice(int(run[0]), int(run[-1]) + 1))
            begin, length = int(own.tokens[0]), int(own.lengths[0])
            gather = partial(self._gather, own, int(own.counts[0]), length)
            parts.append(FreshPart(slice(begin, begin + run.size * length), length, gather))
        return parts

    def chunk(self, row: _Rows, append: int, tree: Tensor | None, *, causal: bool = True) -> ChunkPart:
        """tree: the mask of tokens that are nodes of a tree; None: each sees the positions up to its own, or all."""
        begin, num_keys = int(row.tokens[0]), int(row.lengths[0])
        gather = self._gather(row, int(row.counts[0]), num_keys)
        mask = tree
        if mask is None and not causal:
            return ChunkPart(slice(begin, begin + append), gather, None)
        if mask is None:
            visible = np.arange(num_keys - append, num_keys, dtype=np.int32) + 1
            mask = additive_mask(visible, num_keys, self._window)
        return ChunkPart(slice(begin, begin + append), gather, mask.to(self._device, self._dtype))

    def _decode(self, rows: _Rows, widest: int) -> DecodePart:
        num_keys = int(rows.lengths.max())
        mask = None
        if int(rows.lengths.min()) < num_keys or (self._window is not None and self._window < num_keys):
            mask = additive_mask(rows.lengths, num_keys, self._window).to(self._device)[:, None, None]
        tokens = torch.from_numpy(rows.tokens).to(self._device)
        return DecodePart(tokens, self._gather(rows, widest, num_keys), mask)

    def _gather(self, rows: _Rows, widest: int, num_keys: int) -> PageGather:
        """Short rows are filled up with their own last page, so that no query meets values of another sequence."""
        number = rows.counts.size
        if rows is self.rows and number * widest == self._kv_indices.size:  # all have as many
            pages = self._kv_indices.reshape(number, widest)
        else:
            last = rows.begins + rows.counts - 1
            indexes = np.minimum(rows.begins[:, None] + np.arange(widest, dtype=np.int32), last[:, None])
            pages = self._kv_indices.take(indexes)
        return gather_of(pages, self._pool, num_keys)


def gather_of(pages: Int32Array, pool: Tensor, num_keys: int) -> PageGather:
    """The first num_keys positions of each row of pages, int32 [n, pages each]."""
    _, layers, _, heads, page_size, _ = pool.shape
    first_rows = (pages * np.int32(layers * 2 * heads))[:, None]
    offsets = np.arange(2 * heads, dtype=np.int32).reshape(2, 1, heads, 1)
    shape = (2, pages.shape[0], heads, pages.shape[1] * page_size)
    return PageGather(torch.from_numpy((first_rows + offsets).reshape(-1)).to(pool.device), shape, num_keys)
