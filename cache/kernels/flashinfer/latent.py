"""Kernels of a pool of latents on a CUDA device: attention by FlashInfer, absorbed over the pages or expanded over
gathered entries; append, and what nodes of token trees see of each other, by Triton."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.backend import LatentAppendThenAttend
from tandem.cache.kernels.base import Capabilities, DeviceTables, GroupBuffers, GroupPlan, Latents, Limits
from tandem.cache.kernels.flashinfer.eager import PLAN_BYTES, EagerPlan, PlannedWrappers
from tandem.cache.kernels.flashinfer.parts import AttentionPart, ChosenTokens, plan_parts
from tandem.cache.kernels.flashinfer.wrappers import load_flashinfer
from tandem.cache.kernels.gpu_limits import RANK, ROTATED, check_sizes, latent_sizes
from tandem.cache.kernels.index_keys import Choosers
from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.triton.chosen import attend_chosen
from tandem.cache.kernels.triton.gather import gather, gather_rows
from tandem.cache.kernels.triton.latent_append import append_latents
from tandem.cache.kernels.triton.latent_tree import attend_latent_trees
from tandem.cache.kernels.triton.pushing import AppendPlan
from tandem.cache.kernels.triton.tree import TreeTiles
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array
from tandem.cache.plan.kv_scales import Fp8Rows
from tandem.cache.plan.latent import LatentHeads, UpProjections, absorbed_is_cheaper, heads_at_once
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.tables import PageTables, TokenLayout


class FlashInferLatentKernels(PlannedWrappers[Latents], LatentAppendThenAttend):
    """See LatentBackend. float16 and bfloat16, the sizes of DeepSeek and of GLM, pages of 8 to 64 positions; else
    InvalidArgument."""

    def __init__(
        self,
        pool: Tensor,
        scale: float,
        rank: int,
        heads: LatentHeads,
        top_k: int | None = None,
        fp8: Fp8Rows | None = None,
    ) -> None:
        """Takes 256 MiB of workspace on the pool's device. FlashInfer compiles what it needs on first use. fp8: how a
        pool of 8 bits has the entries; see Fp8LatentKernels."""
        self._dtype, width = (pool.dtype, pool.shape[5]) if fp8 is None else (fp8.dtype, fp8.width)
        check_sizes(self._dtype, pool.shape[4], latent_sizes(width, rank, heads))
        super().__init__(pool)
        self._fp8 = fp8
        self._heads = heads
        self.scale = scale
        self._top_k = top_k
        # The host plans for the lengths; which positions are chosen is found on the device.
        self.capabilities = Capabilities(pushes=True, step_graphs=True, verify_graphs=True, shifts=top_k is not None)
        self._expanded: Any = load_flashinfer().BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD")
        self._heads_at_once = 0
        self._prepare_absorbed()

    def _prepare_absorbed(self) -> None:
        mla, pool = load_flashinfer().mla, self._pool
        layers = [pool[:, layer, 0, 0].split_with_sizes((RANK, ROTATED), 2) for layer in range(pool.shape[1])]
        self._layers = [(latents, keys) for latents, keys in layers]
        self._absorbed: Any = mla.BatchMLAPagedAttentionWrapper(self._workspace)
        self._before_trees: Any = mla.BatchMLAPagedAttentionWrapper(self._workspace)
        self._graph_plan_on_host = torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=True)

    def plan(self, tokens: TokenLayout, tables: PageTables) -> EagerPlan:
        absorbed = absorbed_is_cheaper(np.diff(tokens.qo_indptr), tables.kv_lens, RANK, ROTATED, self._heads)
        choosers, device = Choosers.of(tokens, tables, self._top_k), self._pool.device
        plain = ~(tokens.in_trees | choosers.sequences)
        groups, others = [(absorbed & plain, False), (~absorbed & plain, True)], bool(choosers.tokens.size)
        slots, parts = plan_parts(tokens, tables, groups, self._pool.shape[4], device, others=others)
        return EagerPlan(AppendTargets(slots, None), parts, ChosenTokens.of(choosers, tables.kv_indices, device))

    def buffers(self, limits: Limits, tables: DeviceTables) -> GroupBuffers:
        if self._top_k is not None:
            return ChosenBuffers(AppendTargets(tables.slots, None), self, tables)
        size, device = tables.slots.shape[0], self._pool.device
        qo_indptr, ones = torch.arange(size + 1, dtype=torch.int32), torch.ones(size, dtype=torch.int32)
        wrapper = load_flashinfer().mla.BatchMLAPagedAttentionWrapper(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=qo_indptr.to(device),
            kv_indptr=tables.kv_indptr,
            kv_indices=tables.kv_indices,
            kv_len_arr=ones.to(device),
        )
        # FlashInfer has no call for it: one memory for the plans of all sizes, as BatchDecode has.
        wrapper._int_workspace_buffer = self._graph_workspace
        wrapper._pin_memory_int_workspace_buffer = self._graph_plan_on_host
        wrapper.plan(qo_indptr, qo_indptr, ones * 0, ones, *self._sizes(limits.num_q_heads), False, *self._types())
        return LatentBuffers(AppendTargets(tables.slots, None), self, wrapper, qo_indptr, limits.num_q_heads)

    def append(
        self,
        layer: int,
        q: Tensor,
        latents: Tensor,
        keys: Tensor,
        rotation: Rotation | None,
        own: AppendPlan,
    ) -> tuple[Tensor, Tensor | None]:
        """Appends entries, and rotates q in place."""
        arguments = (self._pool, layer, q, latents, keys, rotation, own.targets)
        return q, append_latents(*arguments, keep=own.keep, fp8=self._fp8)

    def attend(self, layer: int, q: Tensor, own: EagerPlan, up: UpProjections, chosen: Tensor | None = None) -> Tensor:
        output = self.attend_parts(
            own, q, self._heads.value_dim, lambda part, its_q: self._attend_part(layer, part, its_q, up)
        )
        if own.chosen is not None:
            tokens, pages = own.chosen.tokens, (own.chosen.firsts, own.chosen.kv_indices)
            found = self._attend_chosen(layer, q.index_select(0, tokens), up, chosen, pages)
            output.index_copy_(0, tokens, found)
        return output

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        entries = self._gather(layer, upload([slots], self._pool.device)[0]).unsqueeze(1)
        return entries, entries[:, :, :RANK]

    def _gather(self, layer: int, slots: Tensor) -> Tensor:
        """Entries [n, rank + rotated] of slots, int32 [n], on the device."""
        if self._fp8 is not None:
            return gather_rows(self._pool, layer, slots, self._fp8)
        return gather(self._pool, layer, slots)[:, 0, 0]

    def _attend_part(self, layer: int, part: AttentionPart, q: Tensor, up: UpProjections) -> Tensor:
        if part.trees is not None:
            return self._attend_trees(part.trees, layer, q, up)
        if part.kv_slots is None:
            return self._attend_absorbed(self._absorbed, layer, q, up)
        return self._attend_expanded(self._gather(layer, part.kv_slots), q, up)

    def _attend_absorbed(self, wrapper: Any, layer: int, q: Tensor, up: UpProjections) -> Tensor:
        still, rotated = self._split(q)
        return up.values(wrapper.run(up.absorb(still), rotated, *self._layers[layer]))

    def _attend_chosen(
        self, layer: int, q: Tensor, up: UpProjections, chosen: Tensor | None, pages: tuple[Tensor, Tensor]
    ) -> Tensor:
        assert chosen is not None  # whoever plans for choosers gives what they have chosen
        still, rotated = self._split(q)
        rows = up.absorb(still), rotated, chosen
        return up.values(attend_chosen(self._pool, layer, *rows, pages, self.scale, self._fp8))

    def _attend_trees(self, trees: TreeTiles, layer: int, q: Tensor, up: UpProjections) -> Tensor:
        still, rotated = self._split(q)
        wide = up.absorb(still)
        context, lse = self._before_trees.run(wide, rotated, *self._layers[layer], return_lse=True)
        return up.values(attend_latent_trees(self._pool, layer, wide, rotated, context, lse, trees, self.scale))

    def _attend_expanded(self, entries: Tensor, q: Tensor, up: UpProjections) -> Tensor:
        """entries: [n, rank + rotated], of all positions. Some heads at a time, where K and V of all would be large."""
        begins = range(0, q.shape[1], self._heads_at_once)
        outputs = [self._attend_heads(entries, q, up, begin, begin + self._heads_at_once) for begin in begins]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _attend_heads(self, entries: Tensor, q: Tensor, up: UpProjections, begin: int, end: int) -> Tensor:
        """Heads begin … end - 1, whose K and V are gone when this returns."""
        keys, values = up.of_heads(begin, end).keys_and_values(entries)
        return self._expanded.run(q[:, begin:end], keys, values)

    def _plan_part(self, part: AttentionPart, num_q_heads: int, *, causal: bool) -> None:
        if part.kv_slots is None:
            tables = (part.qo_indptr, part.kv_indptr, part.kv_indices, part.kv_lens)
            wrapper = self._absorbed if part.trees is None else self._before_trees
            causal = causal and part.trees is None and not part.single
            wrapper.plan(*tables, *self._sizes(num_q_heads), causal, *self._types())
            return
        at_once = self._heads_at_once = heads_at_once(num_q_heads, int(part.kv_indptr[-1]))
        self._expanded.plan(
            *(part.qo_indptr, part.kv_indptr, at_once, at_once),
            *(self._heads.key_dim + ROTATED, self._heads.value_dim),
            causal=True,
            sm_scale=self.scale,
            q_data_type=self._dtype,
        )

    def _split(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Splits q into the part that is not rotated and the part that is."""
        still, rotated = q.split_with_sizes((self._heads.key_dim, ROTATED), 2)
        return still, rotated

    def _sizes(self, num_heads: int) -> tuple[int, int, int, int]:
        return num_heads, RANK, ROTATED, self._pool.shape[4]

    def _types(self) -> tuple[float, torch.dtype, torch.dtype]:
        return self.scale, self._pool.dtype, self._pool.dtype


@dataclass(frozen=True, eq=False)
class LatentBuffers(AppendPlan, GroupBuffers):
    """A decode step in a CUDA graph: a wrapper of its own that reads the arrays where they stand."""

    kernels: FlashInferLatentKernels
    wrapper: Any
    qo_indptr: Tensor
    num_heads: int

    def plan(self, tokens: TokenLayout, tables: PageTables) -> None:
        """The wrapper's full plan() chose the kernel; this only shares out the work anew."""
        kv_indptr, kv_lens = torch.from_numpy(tables.kv_indptr), torch.from_numpy(tables.kv_lens)
        of = self.kernels
        of._planned.synchronize()
        self.wrapper._plan_info = self.wrapper._cached_module.plan(
            *(of._workspace, of._graph_workspace, of._graph_plan_on_host),
            *(self.qo_indptr, kv_indptr, kv_lens, self.num_heads, RANK, False),
        )
        of._planned.record()

    def run(self, plan: GroupPlan, layer: int, x: Latents) -> Tensor:
        q, _ = self.kernels.append(layer, x.q, x.latents, x.keys, plan.rotation, self)
        return self.kernels._attend_absorbed(self.wrapper, layer, q, x.up)


@dataclass(frozen=True, eq=False)
class ChosenBuffers(AppendPlan, GroupBuffers):
    """A decode step in a CUDA graph whose tokens all attend to chosen positions."""

    kernels: FlashInferLatentKernels
    tables: DeviceTables

    def run(self, plan: GroupPlan, layer: int, x: Latents) -> Tensor:
        q, _ = self.kernels.append(layer, x.q, x.latents, x.keys, plan.rotation, self)
        pages = self.tables.kv_indptr, self.tables.kv_indices
        return self.kernels._attend_chosen(layer, q, x.up, x.chosen, pages)
