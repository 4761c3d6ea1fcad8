"""Kernels of a pool of latents on a CUDA device: attention by FlashInfer, absorbed over the pages or expanded over
gathered entries; append, and what nodes of token trees see of each other, by Triton."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.backend import LatentAppendThenAttend
from tandem.cache.kernels.base import Capabilities, DeviceTables, Limits, PeerPool
from tandem.cache.kernels.flashinfer.kernels import PLAN_BYTES, WORKSPACE_BYTES, check_on_gpu, load_flashinfer
from tandem.cache.kernels.flashinfer.parts import all_slots
from tandem.cache.kernels.gpu_limits import KEY_DIM, RANK, ROTATED, VALUE_DIM, check_sizes, latent_sizes
from tandem.cache.kernels.peer_rows import peer_rows
from tandem.cache.kernels.tree_contexts import TreeContexts
from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.triton.gather import gather
from tandem.cache.kernels.triton.latent_append import append_latents
from tandem.cache.kernels.triton.latent_tree import attend_latent_trees
from tandem.cache.kernels.triton.tree import TreeTiles, lay_out_tiles
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array, indptr_of, ragged_range
from tandem.cache.plan.latent import LatentHeads, UpProjections, absorbed_is_cheaper, heads_at_once
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, Send, TokenLayout


@dataclass(frozen=True, eq=False)
class LatentPart:
    """Some sequences of a forward, all absorbed, all expanded, or all with nodes of trees.

    tokens: int64 [n], on the device, theirs among the packed ones; None: all. qo_indptr, kv_indptr (of pages; of
    positions where expanded) and kv_lens: int32, on the host, where FlashInfer plans. places: int32, on the device,
    their pages, or the slots of all positions where expanded. trees: of nodes, which are absorbed; the arrays then tell
    only what is before their trees.
    """

    absorbed: bool
    tokens: Tensor | None
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor
    places: Tensor
    trees: TreeTiles | None

    @property
    def causal(self) -> bool:
        """Whether some token does not see all that the arrays tell of."""
        return self.trees is None and int(self.qo_indptr[-1]) >= self.qo_indptr.shape[0]


@dataclass(frozen=True, eq=False)
class LatentPlan:
    """keep: whether append returns entries, for a writer that takes them from there."""

    targets: AppendTargets
    keep: bool
    parts: tuple[LatentPart, ...]


@dataclass(frozen=True, eq=False)
class LatentBuffers:
    """A decode step in a CUDA graph: a wrapper of its own that reads the arrays where they stand."""

    targets: AppendTargets
    wrapper: Any
    qo_indptr: Tensor
    num_heads: int
    keep: bool = False


class FlashInferLatentKernels(LatentAppendThenAttend):
    """See LatentBackend. float16 and bfloat16, DeepSeek's sizes,
    pages of 8 to 64 positions; else InvalidArgument.

    As with FlashInferKernels, wrappers are planned when a forward's first layer attends.
    """

    capabilities = Capabilities(pushes=True, step_graphs=True)

    def __init__(self, pool: Tensor, scale: float, rank: int, heads: LatentHeads) -> None:
        """Takes 256 MiB of workspace on the pool's device. FlashInfer compiles what it needs on first use."""
        check_sizes(pool.dtype, pool.shape[4], latent_sizes(pool.shape[5], rank, heads))
        check_on_gpu(pool)
        super().__init__(pool)
        self._flashinfer = load_flashinfer()
        self._pool = pool
        self._heads = heads
        self._scale = scale
        layers = [pool[:, layer, 0, 0].split_with_sizes((RANK, ROTATED), 2) for layer in range(pool.shape[1])]
        self._layers = [(latents, keys) for latents, keys in layers]
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._absorbed: Any = self._flashinfer.mla.BatchMLAPagedAttentionWrapper(self._workspace)
        self._before_trees: Any = self._flashinfer.mla.BatchMLAPagedAttentionWrapper(self._workspace)
        self._expanded: Any = self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD")
        self._graph_plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=pool.device)
        self._graph_plan_on_host = torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)
        self._heads_at_once = 0
        self._current: LatentPlan | None = None
        self._planned = torch.cuda.Event()

    def plan(self, tokens: TokenLayout, tables: PageTables, buffers: Any = None) -> Any:
        if buffers is not None:
            self._refill(buffers, tables)
            return buffers
        absorbed = absorbed_is_cheaper(np.diff(tokens.qo_indptr), tables.kv_lens, RANK, ROTATED, self._heads)
        page_size, in_trees = self._pool.shape[4], tokens.in_trees
        contexts, tiles = lay_out_tiles(tokens, tables, page_size, None)
        groups = [np.flatnonzero(of) for of in (absorbed & ~in_trees, ~absorbed & ~in_trees, in_trees)]
        drafts = [
            _draft(tokens, tables, sequences, way, of, page_size)
            for sequences, way, of in zip(groups, (True, False, True), (None, None, contexts), strict=True)
            if sequences.size
        ]
        arrays = [tables.slot_mapping, *tiles, *(array for draft in drafts for array in (draft.tokens, draft.places))]
        slots, *uploaded = upload(arrays, self._pool.device)
        trees = TreeTiles(*uploaded[: len(tiles)]) if tiles else None
        uploaded = uploaded[len(tiles) :]
        parts = tuple(
            LatentPart(
                draft.absorbed,
                rows if len(drafts) > 1 else None,
                torch.from_numpy(draft.qo_indptr),
                torch.from_numpy(draft.kv_indptr),
                torch.from_numpy(draft.kv_lens),
                places,
                trees if draft.of_trees else None,
            )
            for draft, rows, places in zip(drafts, uploaded[::2], uploaded[1::2], strict=True)
        )
        return LatentPlan(AppendTargets(slots, None), keep=False, parts=parts)

    def push_with_append(
        self, own: LatentPlan, sends: Sequence[Send], peer_pool: PeerPool
    ) -> tuple[LatentPlan, tuple[Send, ...]]:
        """All peers are written to by the one launch."""
        addresses, left = peer_rows(own.targets.slots.shape[0], sends, peer_pool)
        rows = upload([addresses], self._pool.device)[0] if addresses.any() else None
        keep = any(send.token_indices.shape[0] for send in left)
        return replace(own, targets=replace(own.targets, peer_rows=rows), keep=keep), tuple(left)

    def buffers(self, limits: Limits, tables: DeviceTables) -> LatentBuffers:
        size, device = tables.slots.shape[0], self._pool.device
        qo_indptr, ones = torch.arange(size + 1, dtype=torch.int32), torch.ones(size, dtype=torch.int32)
        wrapper = self._flashinfer.mla.BatchMLAPagedAttentionWrapper(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=qo_indptr.to(device),
            kv_indptr=tables.kv_indptr,
            kv_indices=tables.kv_indices,
            kv_len_arr=ones.to(device),
        )
        # FlashInfer has no call for it: one memory for the plans of all sizes, as BatchDecode has.
        wrapper._int_workspace_buffer = self._graph_plan
        wrapper._pin_memory_int_workspace_buffer = self._graph_plan_on_host
        wrapper.plan(qo_indptr, qo_indptr, ones * 0, ones, *self._sizes(limits.num_q_heads), False, *self._types())
        return LatentBuffers(AppendTargets(tables.slots, None), wrapper, qo_indptr, limits.num_q_heads)

    def _refill(self, plan: LatentBuffers, tables: PageTables) -> None:
        """The wrapper's full plan() in buffers() chose the kernel; this only shares out the work anew."""
        kv_indptr, kv_lens = torch.from_numpy(tables.kv_indptr), torch.from_numpy(tables.kv_lens)
        self._planned.synchronize()
        plan.wrapper._plan_info = plan.wrapper._cached_module.plan(
            *(self._workspace, self._graph_plan, self._graph_plan_on_host),
            *(plan.qo_indptr, kv_indptr, kv_lens, plan.num_heads, RANK, False),
        )
        self._planned.record()

    def append(
        self,
        layer: int,
        q: Tensor,
        latents: Tensor,
        keys: Tensor,
        rotation: Rotation | None,
        own: LatentPlan | LatentBuffers,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotates q in place."""
        return q, append_latents(self._pool, layer, q, latents, keys, rotation, own.targets, keep=own.keep)

    def attend(self, layer: int, q: Tensor, own: LatentPlan | LatentBuffers, up: UpProjections) -> Tensor:
        if isinstance(own, LatentBuffers):
            return self._attend_absorbed(own.wrapper, layer, q, up)
        if own is not self._current:
            self._plan_wrappers(own, q.shape[1])
        if len(own.parts) == 1:
            return self._attend_part(layer, own.parts[0], q, up)
        output = q.new_empty((*q.shape[:2], VALUE_DIM))
        for part in own.parts:
            assert part.tokens is not None  # of several parts, each has some
            of_part = self._attend_part(layer, part, q.index_select(0, part.tokens), up)
            output.index_copy_(0, part.tokens, of_part)
        return output

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        entries = gather(self._pool, layer, upload([slots], self._pool.device)[0])[:, 0]
        return entries, entries[:, :, :RANK]

    def _attend_part(self, layer: int, part: LatentPart, q: Tensor, up: UpProjections) -> Tensor:
        if part.trees is not None:
            return self._attend_trees(part.trees, layer, q, up)
        if part.absorbed:
            return self._attend_absorbed(self._absorbed, layer, q, up)
        return self._attend_expanded(gather(self._pool, layer, part.places)[:, 0, 0], q, up)

    def _attend_absorbed(self, wrapper: Any, layer: int, q: Tensor, up: UpProjections) -> Tensor:
        still, rotated = q.split_with_sizes((KEY_DIM, ROTATED), 2)
        return up.values(wrapper.run(up.absorb(still), rotated, *self._layers[layer]))

    def _attend_trees(self, trees: TreeTiles, layer: int, q: Tensor, up: UpProjections) -> Tensor:
        still, rotated = q.split_with_sizes((KEY_DIM, ROTATED), 2)
        wide = up.absorb(still)
        context, lse = self._before_trees.run(wide, rotated, *self._layers[layer], return_lse=True)
        return up.values(attend_latent_trees(self._pool, layer, wide, rotated, context, lse, trees, self._scale))

    def _attend_expanded(self, entries: Tensor, q: Tensor, up: UpProjections) -> Tensor:
        """entries: [n, rank + rotated], of all positions. Some heads at a time, where K and V of all would be large."""
        begins = range(0, q.shape[1], self._heads_at_once)
        outputs = [self._attend_heads(entries, q, up, begin, begin + self._heads_at_once) for begin in begins]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _attend_heads(self, entries: Tensor, q: Tensor, up: UpProjections, begin: int, end: int) -> Tensor:
        """Heads begin … end - 1, whose K and V are gone when this returns."""
        keys, values = up.of_heads(begin, end).keys_and_values(entries)
        return self._expanded.run(q[:, begin:end], keys, values)

    def _plan_wrappers(self, plan: LatentPlan, num_heads: int) -> None:
        # FlashInfer copies its plan from pinned memory that the next plan overwrites.
        self._planned.synchronize()
        for part in plan.parts:
            if part.absorbed:
                tables = (part.qo_indptr, part.kv_indptr, part.places, part.kv_lens)
                wrapper = self._absorbed if part.trees is None else self._before_trees
                wrapper.plan(*tables, *self._sizes(num_heads), part.causal, *self._types())
                continue
            at_once = self._heads_at_once = heads_at_once(num_heads, int(part.kv_indptr[-1]))
            self._expanded.plan(
                *(part.qo_indptr, part.kv_indptr, at_once, at_once, KEY_DIM + ROTATED, VALUE_DIM),
                causal=True,
                sm_scale=self._scale,
                q_data_type=self._pool.dtype,
            )
        self._planned.record()
        self._current = plan

    def _sizes(self, num_heads: int) -> tuple[int, int, int, int]:
        return num_heads, RANK, ROTATED, self._pool.shape[4]

    def _types(self) -> tuple[float, torch.dtype, torch.dtype]:
        return self._scale, self._pool.dtype, self._pool.dtype


@dataclass(frozen=True, eq=False)
class _Draft:
    absorbed: bool
    of_trees: bool
    tokens: NDArray[np.int64]
    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_lens: Int32Array
    places: Int32Array


def _draft(
    tokens: TokenLayout,
    tables: PageTables,
    sequences: NDArray[np.int64],
    absorbed: bool,
    contexts: TreeContexts | None,
    page_size: int,
) -> _Draft:
    """A LatentPart of `sequences` (int64 [n]), before anything is on the device.

    contexts: those of all trees, which are of these sequences. Where nothing is before a tree, one position stands in.
    """
    appends, lengths = np.diff(tokens.qo_indptr)[sequences], tables.kv_lens[sequences]
    if contexts is not None:
        lengths = np.maximum(contexts.bases, 1).astype(np.int32)
    counts = -(-lengths // page_size)
    pages = tables.kv_indices[ragged_range(tables.kv_indptr[sequences], counts)]
    return _Draft(
        absorbed=absorbed,
        of_trees=contexts is not None,
        tokens=ragged_range(tokens.qo_indptr[sequences], appends),
        qo_indptr=indptr_of(appends),
        kv_indptr=indptr_of(counts if absorbed else lengths),
        kv_lens=lengths,
        places=pages if absorbed else all_slots(pages, counts, lengths, page_size),
    )
