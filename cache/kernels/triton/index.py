"""Kernels of a pool of index keys on a CUDA device, eager and in graph buffers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.cache.kernels.backend import AppendThenChoose
from tandem.cache.kernels.base import Capabilities, DeviceTables, GroupBuffers, GroupPlan, Index, Limits, PeerPool
from tandem.cache.kernels.index_keys import SCORE_BYTES, Choosers
from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.triton.gather import gather, gather_rows
from tandem.cache.kernels.triton.index_scores import SeenPages, score_positions
from tandem.cache.kernels.triton.latent_append import append_latents
from tandem.cache.kernels.triton.pushing import AppendPlan, push_to_peers
from tandem.cache.kernels.triton.top_k import choose_top
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.kv_scales import GROUP_COLUMNS, Fp8Rows
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, Send, TokenLayout


@dataclass(frozen=True, eq=False)
class IndexPlan(AppendPlan):
    """A forward with n choosers. tokens: int64 [n], the choosers' indices among the packed tokens; None: all tokens
    choose. seen: the positions they see. tiles: (begin, end, longest), the tokens whose scores are in memory
    together."""

    tokens: Tensor | None
    seen: SeenPages
    tiles: tuple[tuple[int, int, int], ...]


class TritonIndexKernels(AppendThenChoose):
    """See IndexBackend. In graph buffers all tokens choose, also among few positions."""

    capabilities = Capabilities(trees=False, pushes=True, step_graphs=True, verify_graphs=True)

    def __init__(self, pool: Tensor, rank: int, top_k: int, fp8: Fp8Rows | None = None) -> None:
        """fp8: how a pool of 8 bits has the keys, with one scale each; else InvalidArgument."""
        super().__init__(pool)
        self._pool, self._rank, self._top_k, self._fp8 = pool, rank, top_k, fp8
        if fp8 is not None and fp8.num_groups > 1:
            raise InvalidArgument(f"index_head_dim is {fp8.width}; in 8 bits it must be at most {GROUP_COLUMNS}")

    def plan(self, tokens: TokenLayout, tables: PageTables) -> IndexPlan:
        choosers, device = Choosers.of(tokens, tables, self._top_k), self._pool.device
        arrays = [tables.slot_mapping, choosers.tokens, choosers.lengths, choosers.firsts, tables.kv_indices]
        slots, rows, *seen = upload(arrays, device)
        return IndexPlan(AppendTargets(slots, None), rows, SeenPages(*seen), tuple(cut_tiles(choosers.lengths)))

    def buffers(self, limits: Limits, tables: DeviceTables) -> "IndexBuffers":
        size = limits.num_tokens
        longest = tables.kv_indices.shape[0] // size * self._pool.shape[4]
        seen = SeenPages(torch.ones_like(tables.kv_last_page_len), tables.kv_indptr[:-1], tables.kv_indices)
        return IndexBuffers(AppendTargets(tables.slots, None), None, seen, ((0, size, longest),), tables, self)

    def push_with_append(
        self, own: IndexPlan, sends: Sequence[Send], peer_pool: PeerPool
    ) -> tuple[IndexPlan, tuple[Send, ...]]:
        return push_to_peers(own, sends, peer_pool, self._pool.device)

    def append(
        self, layer: int, q: Tensor, still: Tensor, rotated: Tensor, rotation: Rotation | None, own: IndexPlan
    ) -> tuple[Tensor, Tensor | None]:
        """Appends keys, and rotates q in place."""
        arguments = (self._pool, layer, q, still, rotated, rotation, own.targets)
        return q, append_latents(*arguments, keep=own.keep, fp8=self._fp8)

    def choose(self, layer: int, q: Tensor, weights: Tensor, own: IndexPlan) -> Tensor:
        if own.tokens is not None:
            q, weights = q.index_select(0, own.tokens), weights.index_select(0, own.tokens)
        chosen = [q.new_empty((0, self._top_k), dtype=torch.int32)] if not own.tiles else []
        for begin, end, longest in own.tiles:
            seen = own.seen.between(begin, end)
            rows = q[begin:end], weights[begin:end]
            scores = score_positions(self._pool, layer, *rows, seen, longest, self._fp8)
            chosen.append(choose_top(scores, seen.lengths, self._top_k))
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        (slots_there,) = upload([slots], self._pool.device)
        if self._fp8 is None:
            entries = gather(self._pool, layer, slots_there)[:, 0]
        else:
            entries = gather_rows(self._pool, layer, slots_there, self._fp8).unsqueeze(1)
        return entries, entries[:, :, : self._rank]


@dataclass(frozen=True, eq=False)
class IndexBuffers(IndexPlan, GroupBuffers):
    """The plan of all forwards in them."""

    tables: DeviceTables
    kernels: TritonIndexKernels

    def begin_captured(self, by_layers: bool = False) -> None:
        """Queues the computation of the rows' lengths."""
        full = (self.tables.kv_indptr[1:] - self.tables.kv_indptr[:-1] - 1) * self.kernels._pool.shape[4]
        torch.add(full, self.tables.kv_last_page_len, out=self.seen.lengths)

    def run(self, plan: GroupPlan, layer: int, x: Index) -> Tensor:
        return self.kernels.run(plan, layer, x)


def cut_tiles(lengths: Int32Array, most: int = SCORE_BYTES // 4) -> list[tuple[int, int, int]]:
    """(begin, end, longest) of neighbouring tokens that see `lengths` (int32 [n]) positions each: as many in a tile as
    have at most `most` scores together, all as wide as the longest; at least one."""
    tiles, begin, longest = [], 0, 0
    for token, length in enumerate(lengths.tolist()):
        wider = max(longest, length)
        if token > begin and (token - begin + 1) * wider > most:
            tiles.append((begin, token, longest))
            begin, wider = token, length
        longest = wider
    return [*tiles, (begin, lengths.size, longest)] if lengths.size else []
