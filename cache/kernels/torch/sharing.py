"""Attention of single queries in parts with torch operations: shared pages once for all sequences, the rest for each.

A part's result is its output with the log-sum-exp of its scores. Two results make the joint result:
lse = log(e^lse_1 + e^lse_2), o = o_1 · e^(lse_1 - lse) + o_2 · e^(lse_2 - lse).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.attention import AttentionPart, DecodePart, PageGather, gather_of, plan_decodes
from tandem.cache.plan.arrays import IntArray
from tandem.cache.plan.shared_prefixes import SharedPrefixes, SharingRule
from tandem.cache.plan.tables import PageTables, TokenLayout, own_tables

KEYS_AT_ONCE = 512  # of a segment; their scores stand in memory together
# Numbers of K and V, of one layer, that sharing must save to pay for itself, and each segment. Measured on one core:
# with 4/2 heads of 16 to 32/8 of 128 and 2 to 64 sequences it breaks even between 0.75 and 1.5 million.
SAVED = 1 << 20
SAVED_BY_SEGMENT = 1 << 18


@dataclass(frozen=True, eq=False)
class Segment:
    """Pages that some queries of a SharedDecodes attend to together. members: int64 [m], these queries."""

    members: Tensor
    gather: PageGather

    def attend(self, spans: Tensor, q: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        """o [m, Hq, D] and lse [m, Hq], float32, of all queries q."""
        keys, values = (x.squeeze(0).float() for x in self.gather(spans, q))  # [Hkv, n, D]
        heads = keys.shape[0]
        queries = q.index_select(0, self.members).float().unflatten(1, (heads, -1))  # [m, Hkv, group, D]
        rows = queries.transpose(0, 1).flatten(1, 2)
        o, lse = scoring.attend_in_part(rows @ keys.transpose(1, 2), values)
        count = self.members.shape[0]
        return (
            o.unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2),
            lse.unflatten(1, (count, -1)).transpose(0, 1).flatten(1, 2),
        )


@dataclass(frozen=True, eq=False)
class SharedDecodes(AttentionPart):
    """Sequences with one new token each, some of which share pages.

    own: parts that cover every query once, with its pages that no segment has.
    """

    own: tuple[DecodePart, ...]
    segments: tuple[Segment, ...]

    def attend(
        self, spans: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        output = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for part in self.own:
            output[part.tokens], lse[part.tokens] = part.attend_in_part(spans, part.take(q), scoring)
        for segment in self.segments:
            of_segment, its_lse = segment.attend(spans, q, scoring)
            before = lse.index_select(0, segment.members)
            total = torch.logaddexp(before, its_lse)
            merged = output.index_select(0, segment.members) * (before - total).exp().unsqueeze(-1)
            merged += of_segment * (its_lse - total).exp().unsqueeze(-1)
            output.index_copy_(0, segment.members, merged)
            lse.index_copy_(0, segment.members, total)
        if sinks is not None:  # they count in each softmax
            output *= torch.sigmoid(lse - sinks.float()).unsqueeze(-1)
        return output.to(q.dtype)


def plan_shared(tokens: TokenLayout, tables: PageTables, pool: Tensor, dtype: torch.dtype) -> SharedDecodes:
    """The part of all tokens of tokens.single; tables.shared says what these share. dtype: of q."""
    assert tables.shared is not None
    single = np.flatnonzero(tokens.single)
    own = plan_decodes(own_tables(tables, single, pool.shape[4]), pool, dtype)
    rows = torch.from_numpy(tokens.qo_indptr[single].astype(np.int64)).to(pool.device)
    return SharedDecodes(rows, own, plan_segments(tables.shared, np.cumsum(tokens.single) - 1, pool))


def plan_segments(shared: SharedPrefixes, queries_of: IntArray, pool: Tensor) -> tuple[Segment, ...]:
    """queries_of: [B], the row of q that each sequence of a segment has."""
    queries, bounds = shared.qo_indptr.tolist(), shared.kv_indptr.tolist()
    page_size = pool.shape[4]
    at_once = max(KEYS_AT_ONCE // page_size, 1)
    segments: list[Segment] = []
    for index in range(len(queries) - 1):
        chosen = queries_of[shared.members[queries[index] : queries[index + 1]]]
        members = torch.from_numpy(chosen.astype(np.int64)).to(pool.device)
        for begin in range(bounds[index], bounds[index + 1], at_once):
            pages = shared.kv_indices[begin : min(begin + at_once, bounds[index + 1])]
            segments.append(Segment(members, gather_of(pages[None], pool, pages.size * page_size)))
    return tuple(segments)


def sharing_rule(pool: Tensor, window: int | None) -> SharingRule | None:
    """See Capabilities.sharing."""
    if window is not None:
        return None
    page = pool[0, 0].numel()
    return SharingRule(-(-SAVED_BY_SEGMENT // page), -(-SAVED // page))
