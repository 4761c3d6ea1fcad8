"""Torch kernels that can be captured in a graph, for machines without a GPU: they read tables where they stand."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.base import QKV, DeviceTables, GroupBuffers, GroupPlan, Limits, Query
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.torch.kernels import TorchKernels, TorchPlan
from tandem.cache.plan.arrays import indptr_of
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.tables import PageTables, TokenLayout, lay_out_tokens

MOST_SEGMENTS = 3


class TableKernels(TorchKernels):
    """A backend with graphs of all kinds. What a padding row attends to is NaN: nobody can have used it."""

    def __init__(self, pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> None:
        super().__init__(pool, scoring, fp8)
        self.capabilities = replace(self.capabilities, step_graphs=True, sharing_graphs=True, verify_graphs=True)
        self.capabilities = replace(self.capabilities, sliding_graphs=scoring.window is None)

    def buffers(self, limits: Limits, tables: DeviceTables) -> "TableBuffers":
        assert limits.one_each == (tables.qo_indptr is None)
        return TableBuffers(self, tables, limits.sharing)

    def largest_prompt(self, num_sequences: int, num_q_heads: int) -> int:
        return 1 << 20

    def largest_sharing_step(self, num_q_heads: int) -> int:
        return 1 << 20


@dataclass(eq=False)
class TableBuffers(GroupBuffers):
    """shared: of the forward that was planned last, in buffers for sharing."""

    kernels: TableKernels
    tables: DeviceTables
    sharing: bool
    shared: SharedPrefixes | None = None

    def takes_shared(self, shared: SharedPrefixes) -> bool:
        return shared.qo_indptr.size - 1 <= MOST_SEGMENTS

    def plan(self, tokens: TokenLayout, tables: PageTables) -> None:
        assert tables.kv_indptr.size == self.tables.kv_indptr.shape[0]
        assert tables.slot_mapping.size == self.tables.slots.shape[0]
        assert self.tables.qo_indptr is None or tokens.qo_indptr.size == tables.kv_indptr.size
        assert tables.shared is None or self.sharing
        self.shared = tables.shared

    def run(self, plan: GroupPlan, layer: int, x: QKV) -> Tensor:
        tables, (q, k, v, sinks, norm, _) = self.tables, x
        output = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        rows = np.flatnonzero(tables.slots.numpy() >= 0)
        if rows.size:
            if norm is not None:
                q, k = norm.apply(q, k)
            if plan.rotation is not None:
                q, k = plan.rotation.apply_both(q, k)
            stored = self._plan_of(rows, tables)
            self.kernels.append(layer, q[rows], k[rows], v[rows], None, stored)
            if tables.sliding is not None:
                for row in rows.tolist():
                    output[row] = self._slide(layer, q[row], row, tables, plan.rotation, sinks)
                return output
            output[rows] = self.kernels.attend(layer, q[rows], k[rows], v[rows], stored, sinks)
        return output

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        tables = self.tables
        q = x.q if x.norm is None else x.norm.apply_to_queries(x.q)
        q = q if plan.rotation is None else plan.rotation.apply(q)
        output = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        rows = np.flatnonzero(tables.slots.numpy() >= 0)
        if tables.sliding is not None:
            for row in rows.tolist():
                output[row] = self._slide(layer, q[row], row, tables, plan.rotation, x.sinks)
        elif rows.size:
            output[rows] = self.kernels.attend(layer, q[rows], None, None, self._plan_of(rows, tables), x.sinks)
        return output

    def _plan_of(self, rows: NDArray[np.int64], tables: DeviceTables) -> TorchPlan:
        return self._stored(rows, tables) if tables.qo_indptr is None else self._prompts(rows, tables)

    def _slide(
        self, layer: int, q: Tensor, row: int, tables: DeviceTables, rotation: Rotation | None, sinks: Tensor | None
    ) -> Tensor:
        """o [num_q_heads, head_dim] of one row, key by key."""
        assert tables.sliding is not None
        sink, hole, turned_sinks, turned, index, position = tables.sliding.view(6, -1)[:, row].tolist()
        first, end = tables.kv_indptr[row : row + 2].tolist()
        length = (end - first - 1) * self.kernels._page_size + int(tables.kv_last_page_len[row])
        scores, values = [], []
        for key in [*range(min(sink, length)), *range(sink + hole, length)]:
            page = int(tables.kv_indices[first + key // self.kernels._page_size])
            slots = np.array([page * self.kernels._page_size + key % self.kernels._page_size], np.int32)
            k, v = self.kernels.read_slots(layer, slots)
            is_turned = key < (turned_sinks if key < sink else turned)
            own = q[None]
            if rotation is not None:
                place = key if key < sink else key - hole
                at = position if is_turned and key >= sink else index
                own = Rotation(rotation.table[at : at + 1]).apply(own)
                k = k if is_turned else Rotation(rotation.table[place : place + 1]).apply(k)
            group = q.shape[0] // k.shape[1]
            scores.append((own[0] * k[0].repeat_interleave(group, 0)).sum(-1))
            values.append(v[0].repeat_interleave(group, 0))
        products = torch.stack(scores, -1)[None, :, None].float()
        weights = self.kernels.scoring.weigh(products, None, sinks)[0, :, 0]
        return torch.einsum("hk,khd->hd", weights, torch.stack(values)).to(q.dtype)

    def _prompts(self, rows: NDArray[np.int64], tables: DeviceTables) -> TorchPlan:
        """The plan of the sequences that have tokens, whose rows these are."""
        assert tables.qo_indptr is not None
        counts = np.diff(tables.qo_indptr.numpy())
        used = int(np.count_nonzero(counts))
        assert counts[:used].all()  # padding comes last
        assert rows.tolist() == list(range(counts.sum()))
        indptr, last = tables.kv_indptr.numpy()[: used + 1], tables.kv_last_page_len.numpy()[:used]
        lengths = (np.diff(indptr) - 1) * self.kernels._page_size + last
        pages = tables.kv_indices.numpy()[: indptr[-1]]
        own = PageTables(tables.slots.numpy()[rows], indptr.copy(), pages.copy(), last.copy(), lengths)
        return self.kernels.plan(
            lay_out_tokens(lengths.astype(np.int64) - counts[:used], counts[:used].astype(np.int64)), own
        )

    def _stored(self, rows: NDArray[np.int64], tables: DeviceTables) -> TorchPlan:
        """The plan of `rows` alone, those that are no padding."""
        slots, indptr = tables.slots.numpy(), tables.kv_indptr.numpy()
        last, indices = tables.kv_last_page_len.numpy(), tables.kv_indices.numpy()
        assert rows.tolist() == list(range(rows.size))  # padding comes last
        lengths = (np.diff(indptr)[rows] - 1) * self.kernels._page_size + last[rows]
        end = int(indptr[rows.size])
        own = PageTables(
            slots[rows].copy(),
            indptr[: rows.size + 1].copy(),
            indices[:end].copy(),
            last[rows].copy(),
            lengths.astype(np.int32),
        )
        if self.shared is not None:
            own = self._whole(own, self.shared)
            lengths = own.kv_lens
        tokens = lay_out_tokens(lengths.astype(np.int64) - 1, np.ones(rows.size, np.int64))
        return self.kernels.plan(tokens, own)

    def _whole(self, own: PageTables, shared: SharedPrefixes) -> PageTables:
        """Makes tables of all pages of each sequence from its own pages and its segments', level by level."""
        pages = [own.kv_indices[begin:end].tolist() for begin, end in pairwise(own.kv_indptr)]
        covered: list[list[int]] = [[] for _ in pages]
        for members, of in zip(pairwise(shared.qo_indptr), pairwise(shared.kv_indptr), strict=True):
            for sequence in shared.members[slice(*members)]:
                covered[sequence] += shared.kv_indices[slice(*of)].tolist()
        whole = [first + rest for first, rest in zip(covered, pages, strict=True)]
        lengths = own.kv_lens + shared.own_begins.astype(np.int32) * self.kernels._page_size
        indptr = indptr_of(np.array([len(one) for one in whole]))
        indices = np.array([page for one in whole for page in one], np.int32)
        return PageTables(own.slot_mapping, indptr, indices, own.kv_last_page_len, lengths, shared)
