"""Kernels of a pool on a CUDA device by Triton alone: for heads that FlashInfer has no kernels for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.base import Capabilities, DeviceTables, Limits, Part, PeerPool
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.paged.prompts import FIELDS, attend_tiles, lay_out_tiles, most_tiles
from tandem.cache.kernels.paged.steps import DecodeSteps, KVBuffers, TritonSteps
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.triton.decode_plan import DecodePlan
from tandem.cache.kernels.triton.pushing import AppendPlan, push_to_peers
from tandem.cache.kernels.triton.tree import TreeTiles, attend_trees
from tandem.cache.kernels.triton.tree import lay_out_tiles as lay_out_nodes
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, Send, TokenLayout

MOST_TOKENS = 1 << 20  # of prompts in graph buffers, which take no workspace


@dataclass(frozen=True, eq=False)
class TreePart:
    """Nodes of trees, on the device. tokens: int64 [n], the nodes' places among all tokens. contexts: tiles of the
    packed nodes, with the positions before a tree that all its nodes see. nodes: what else they see."""

    tokens: Tensor
    contexts: Tensor
    nodes: TreeTiles


@dataclass(frozen=True, eq=False)
class TilePlan(AppendPlan):
    """tiles: int32 [tiles, FIELDS], of all tokens but nodes of trees. kv_indices: as PageTables has them. causal: see
    plan_read."""

    tiles: Tensor
    kv_indices: Tensor
    trees: TreePart | None = None
    causal: bool = True


class TritonKernels(TritonSteps):
    """See KVBackend. head_dim is a power of two of at least 16, and in Triton's interpreter dtypes may be others, too;
    else as FlashInferKernels. Sequences do not share pages while they attend. Steps in which sequences slide have no
    graph buffers."""

    capabilities = Capabilities(pushes=True, step_graphs=True, verify_graphs=True, reads=True)

    def __init__(self, pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> None:
        super().__init__(pool, scoring, fp8)
        self._without_window = replace(scoring, window=None)

    def plan(self, tokens: TokenLayout, tables: PageTables) -> TilePlan:
        return self._plan_tiles(self._tiles(tokens, tables, ~tokens.in_trees), tokens, tables)

    def buffers(self, limits: Limits, tables: DeviceTables) -> "DecodeSteps | TileBuffers":
        if limits.one_each:
            return DecodeSteps(self, DecodePlan.make(tables, *self._sizes(limits.num_q_heads)[:3]))
        count, device = most_tiles(limits.num_tokens, limits.num_sequences), tables.slots.device
        tiles = torch.zeros((count, FIELDS), dtype=torch.int32, device=device)
        return TileBuffers(AppendTargets(tables.slots, None), self, tiles, tables.kv_indices)

    def largest_prompt(self, num_sequences: int, num_q_heads: int) -> int:
        return MOST_TOKENS

    def push_with_append(
        self, own: TilePlan, sends: Sequence[Send], peer_pool: PeerPool
    ) -> tuple[TilePlan, tuple[Send, ...]]:
        return push_to_peers(own, sends, peer_pool, self._pool.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, own: TilePlan, sinks: Tensor | None = None
    ) -> Tensor:
        scales = self._scales(layer)
        arguments = own.tiles, own.kv_indices, self.scoring, sinks, scales
        output, _ = attend_tiles(self._pool, layer, q, *arguments)
        if own.trees is None:
            return output
        nodes = q.index_select(0, own.trees.tokens)
        arguments = own.trees.contexts, own.kv_indices, self._without_window, None, scales
        context, lse = attend_tiles(self._pool, layer, nodes, *arguments, with_lse=True)
        assert lse is not None
        seen = attend_trees(self._pool, layer, nodes, context, lse, own.trees.nodes, self.scoring, sinks, scales)
        return output.index_copy_(0, own.trees.tokens, seen)

    def plan_read(self, tokens: TokenLayout, tables: PageTables, *, causal: bool) -> TilePlan:
        return replace(self._plan_tiles(self._tiles(tokens, tables, causal=causal), tokens, tables), causal=causal)

    def read_part(self, own: TilePlan, layer: int, q: Tensor) -> Part:
        scoring = self.scoring if own.causal else self._without_window
        arguments = own.tiles, own.kv_indices, scoring, None, self._scales(layer)
        output, lse = attend_tiles(self._pool, layer, q, *arguments, with_lse=True)
        assert lse is not None
        return Part(output, lse.mul_(math.log(2)))

    def _tiles(
        self, tokens: TokenLayout, tables: PageTables, which: NDArray[np.bool_] | None = None, *, causal: bool = True
    ) -> Int32Array:
        """Lays out tiles for the chosen sequences, or for all if `which` is None."""
        firsts, pages = tokens.qo_indptr[:-1], tables.kv_indptr[:-1]
        of_each = firsts, np.diff(tokens.qo_indptr), pages, tables.kv_lens
        chosen = of_each if which is None else tuple(array[which] for array in of_each)
        return lay_out_tiles(*chosen, causal=causal, window=self.scoring.window if causal else None)

    def _plan_tiles(self, tiles: Int32Array, tokens: TokenLayout, tables: PageTables) -> TilePlan:
        """Uploads the whole plan in one copy."""
        contexts, arrays = lay_out_nodes(tokens, tables, self._pool.shape[4], self.scoring.window)
        trees = tokens.trees
        if contexts is not None and trees is not None:
            firsts, pages = np.cumsum(trees.counts) - trees.counts, tables.kv_indptr[trees.sequences]
            before = lay_out_tiles(firsts, trees.counts, pages, contexts.bases, causal=False, begins=contexts.commons)
            arrays = [trees.tokens, before, *arrays]
        uploaded = upload([tables.slot_mapping, tiles, tables.kv_indices, *arrays], self._pool.device)
        slots, on_device, kv_indices, *of_trees = uploaded
        part = TreePart(of_trees[0], of_trees[1], TreeTiles(*of_trees[2:])) if of_trees else None
        return TilePlan(AppendTargets(slots, None), on_device, kv_indices, part)


@dataclass(frozen=True, eq=False)
class TileBuffers(KVBuffers):
    """Graph buffers of prompts. tiles: as TilePlan has them, as many as can be needed; those that are not needed are
    zeros."""

    kernels: TritonKernels
    tiles: Tensor
    kv_indices: Tensor

    def plan(self, tokens: TokenLayout, tables: PageTables) -> None:
        tiles = self.kernels._tiles(tokens, tables)
        missing = self.tiles.shape[0] - tiles.shape[0]
        self.tiles.copy_(upload([np.pad(tiles, ((0, missing), (0, 0)))], self.tiles.device)[0])

    def attend(
        self, layer: int, q: Tensor, rotation: Rotation | None, sinks: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        arguments = self.tiles, self.kv_indices, self.kernels.scoring, sinks, self.kernels._scales(layer)
        return attend_tiles(self.kernels._pool, layer, q, *arguments, padded=True)[0]
