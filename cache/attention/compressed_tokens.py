"""Layers with K and V in one plane in a forward of fixed shape: what they read is looked up by token, on the device.

So a decode step can be captured: pages are taken before, and which tokens complete an entry follows from positions. See
tandem.cache.kernels.compressed for the kernels, and compressed.py for forwards that are planned on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.compressed import check_compression
from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.kernels.base import Compression, DeviceTables, Entries, GroupPlan, SharedKV
from tandem.cache.kernels.compressed.choice import TokenKernels, choose_token_kernels
from tandem.cache.kernels.compressed.tokens import NewTokens, TokenPages
from tandem.cache.kernels.upload import upload
from tandem.cache.kinds.compressed import CompressedGroups
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import TokenLayout

Rotate = Callable[[Tensor], Sequence[Rotation | None]]
"""The rotation of positions, int64 [T] on the device, for each layer group."""


@dataclass(frozen=True, eq=False)
class GroupTokens:
    """The places of a forward's tokens in one layer group. slots: int32 [T], see NewTokens."""

    pages: TokenPages
    slots: Tensor


@dataclass(eq=False)
class TokenForward:
    """A forward of T tokens. positions: int64 [T], preceding: int32 [T], see NewTokens. tokens: one for each layer
    group. ends: in an eager forward, the tokens that complete an entry, int64 [n], by `every`."""

    groups: Sequence[GroupAttention]
    plans: Sequence[GroupPlan]
    tokens: Sequence[GroupTokens]
    positions: Tensor
    preceding: Tensor
    rotations: Rotate
    ends: dict[int, Tensor] | None = None
    _starts: dict[int, Sequence[Rotation | None]] = field(default_factory=dict)
    _kernels: TokenKernels = field(init=False)

    def __post_init__(self) -> None:
        self._kernels = choose_token_kernels(self.positions.device)

    @classmethod
    def of_buffers(
        cls,
        groups: Sequence[GroupAttention],
        plans: Sequence[GroupPlan],
        tables: Sequence[DeviceTables],
        positions: Tensor,
        rotations: Rotate,
    ) -> "TokenForward":
        """Makes the tokens of a step in graph buffers, where each row is a sequence of its own."""
        preceding = tables[0].preceding
        if preceding is None:
            preceding = torch.zeros_like(positions, dtype=torch.int32)
        tokens = [_of_step(group, one, positions) for group, one in zip(groups, tables, strict=True)]
        return cls(groups, plans, tokens, positions, preceding, rotations)

    @classmethod
    def of_forward(
        cls, groups: Sequence[GroupAttention], plans: Sequence[GroupPlan], tokens: TokenLayout, rotations: Rotate
    ) -> "TokenForward":
        """Makes the tokens of an eager forward without token trees."""
        device, positions = groups[0].site.device, tokens.positions.astype(np.int64)
        preceding = (tokens.positions - tokens.positions[tokens.qo_indptr[tokens.owners]]).astype(np.int32)
        rates = sorted({group.table.every for group in groups} - {1})
        ends = [np.flatnonzero((positions + 1) % every == 0) for every in rates]
        uploaded, before, *of_rates = upload([positions, preceding, *ends], device)
        found = [
            _of_forward(plan, group.table.every, tokens, device) for group, plan in zip(groups, plans, strict=True)
        ]
        return cls(groups, plans, found, uploaded, before, rotations, dict(zip(rates, of_rates, strict=True)))

    def attend(
        self,
        of: CompressedGroups | None,
        attended: int,
        places: tuple[int, int, int, int],
        x: SharedKV,
        compression: Compression | None,
    ) -> Tensor:
        """o of each token, see Attention.attend_shared: stores K = V, inputs and entries here, and says so where
        something is sent.

        attended: the layer's group with K and V. places: the layer's index there, and in the groups of `of`.
        """
        group, plan, kernels = self.groups[attended], self.plans[attended], self._kernels
        own, pool, rotation = self.tokens[attended], group.site.pool, plan.rotation
        q, kv = kernels.rotate_and_append(pool, places[0], x.q, x.kv, rotation, own.slots)
        group.appended(plan, places[0], kv, None)
        entries = visible = chosen = None
        longest = 0
        if of is not None and compression is not None:
            self._append(of, attended, places, compression)
            entries, every, longest = self._entries(of.entries, places[2])
            visible = torch.div(self.positions + 1, every, rounding_mode="floor").int()
            if of.keys is not None and of.top_k is not None and compression.query is not None:
                query = kernels.rotate_queries(compression.query.q, rotation)
                keys, weights = self._entries(of.keys, places[3])[0], compression.query.weights
                chosen = kernels.choose_entries(keys, query, weights, visible, of.top_k, longest)
        window, beside = (pool, places[0], own.pages), (entries, visible, chosen)
        size, scale = group.kind.keeps.window, group.site.heads.scale_of(group.kind.head_dim)
        return kernels.attend(window, size, *beside, q, self.positions, x.sinks, scale, rotation, longest)

    def _append(self, of: CompressedGroups, attended: int, places: tuple[int, int, int, int], x: Compression) -> None:
        inputs = self.tokens[of.inputs]
        if self.ends is not None:  # a graph takes what the forward before its capture took
            self._check(of, x)
        new = NewTokens(self.positions, self.preceding, inputs.slots)
        pool = self._pool(of.inputs)
        for part, group in enumerate((of.entries,) if of.keys is None else (of.entries, of.keys)):
            every, place = self.groups[group].table.every, places[2 + part]
            if every not in self._starts:
                starts = torch.div(self.positions, every, rounding_mode="floor") * every
                self._starts[every] = self.rotations(starts)
            its, pages = self._pool(group), (inputs.pages, self.tokens[group].pages)
            rotation = self._starts[every][attended]
            made = self._kernels.compress_and_append(pool, places[1], its, place, x, part, rotation, new, *pages)
            if self.ends is not None:
                self.groups[group].appended(self.plans[group], place, made[self.ends[every]], None)
        self.groups[of.inputs].appended(self.plans[of.inputs], places[1], x.values.unsqueeze(1), x.gates.unsqueeze(1))

    def _check(self, of: CompressedGroups, x: Compression) -> None:
        made = [of.entries] if of.keys is None else [of.entries, of.keys]
        inputs, num_tokens = self.groups[of.inputs], self.positions.shape[0]
        inputs.check(num_tokens, Entries(x.values.unsqueeze(1), x.gates.unsqueeze(1)))
        every, width = self.groups[of.entries].table.every, inputs.kind.head_dim
        check_compression(x, num_tokens, every, width, [self._pool(group) for group in made])

    def _entries(self, group: int, place: int) -> tuple[tuple[Tensor, int, TokenPages], int, int]:
        """Returns what kernels read of a group of entries, the number of positions of an entry, and the most entries of
        a sequence."""
        table = self.groups[group].table
        most = table.pages.shape[1] * table.page_size
        if self.ends is not None:  # eager: as many as there are
            most = int(self.plans[group].tables.kv_lens.max(initial=1))
        return (self._pool(group), place, self.tokens[group].pages), table.every, max(1, most)

    def _pool(self, group: int) -> Tensor:
        return self.groups[group].site.pool


def has_by_token(groups: Sequence[GroupAttention]) -> bool:
    """Whether forwards in graph buffers, and on a GPU, are by token."""
    return any(group.kind.by_token for group in groups)


def takes_by_token(groups: Sequence[GroupAttention], tokens: TokenLayout) -> bool:
    """Whether an eager forward is one by token: on a GPU, but for nodes of trees."""
    return has_by_token(groups) and groups[0].site.device.type == "cuda" and tokens.trees is None


def _of_step(group: GroupAttention, tables: DeviceTables, positions: Tensor) -> GroupTokens:
    firsts = tables.kv_indptr[:-1]
    if group.table.every > 1:  # such groups drop no page
        return GroupTokens(TokenPages(firsts, torch.zeros_like(firsts), tables.kv_indices), tables.slots)
    pages = tables.kv_indptr[1:] - firsts
    stored = (pages - 1) * group.table.page_size + tables.kv_last_page_len
    return GroupTokens(TokenPages(firsts, (positions + 1).int() - stored, tables.kv_indices), tables.slots)


def _of_forward(plan: GroupPlan, every: int, tokens: TokenLayout, device: torch.device) -> GroupTokens:
    tables = plan.tables
    begins = np.zeros_like(tables.kv_lens) if every > 1 else tokens.seq_lens - tables.kv_lens
    by_token = (tables.kv_indptr[:-1][tokens.owners], begins[tokens.owners])
    indices = tables.kv_indices if tables.kv_indices.size else np.zeros(1, np.int32)
    arrays = [*(one.astype(np.int32) for one in by_token), indices, tables.slot_mapping]
    firsts, starts, pages, slots = upload(arrays, device)
    return GroupTokens(TokenPages(firsts, starts, pages), slots)
