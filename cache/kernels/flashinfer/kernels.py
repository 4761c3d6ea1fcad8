"""Kernels of a pool on a CUDA device: attention of prompts by FlashInfer, append and steps by Triton."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import FLASHINFER_HEAD_DIMS, QKV, Capabilities, DeviceTables, Limits, Part
from tandem.cache.kernels.flashinfer.eager import WORKSPACE_BYTES, EagerPlan, PlannedWrappers
from tandem.cache.kernels.flashinfer.parts import AttentionPart, plan_parts
from tandem.cache.kernels.flashinfer.prompts import FixedPrompts, largest_prompt
from tandem.cache.kernels.flashinfer.sharing import FixedSharing, SharedPart, largest_decode, sharing_rule
from tandem.cache.kernels.flashinfer.wrappers import load_flashinfer
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.gpu_limits import check_sizes
from tandem.cache.kernels.paged.steps import DecodeSteps, KVBuffers, SlidingSteps, TritonSteps
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.kernels.triton.append import AppendTargets
from tandem.cache.kernels.triton.decode_plan import DecodePlan
from tandem.cache.kernels.triton.merge import merge_parts
from tandem.cache.kernels.triton.tree import attend_trees
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.tables import PageTables, TokenLayout

GATHER_FROM = 1024  # new tokens of prompts from which attention over gathered K and V is faster, with the gathering
GATHER_FP8_FROM = 192  # the same over 8 bits, which FlashInfer otherwise widens for every block of queries
PROMPTS_PLAN_BYTES = 1 << 20  # what a plan of some thousand tokens takes many times over


class FlashInferKernels(TritonSteps, PlannedWrappers[QKV]):
    """See KVBackend. float16 and bfloat16, also stored as float8_e4m3fn, head_dim 64, 128 or 256, pages of 8 to 64
    positions; else InvalidArgument.

    Its graph buffers are DecodeSteps where sequences do not share pages, else SharingBuffers, SlidingSteps where some
    may slide, and PromptBuffers.
    """

    def __init__(self, pool: Tensor, scoring: Scoring, fp8: Fp8Entries | None = None) -> None:
        """Takes 256 MiB of workspace on the pool's device. FlashInfer compiles what it needs on first use."""
        dtype = pool.dtype if fp8 is None else fp8.dtype
        check_sizes(dtype, pool.shape[4], (("head_dim", pool.shape[5], FLASHINFER_HEAD_DIMS),))
        super().__init__(pool, scoring, fp8)
        rule = sharing_rule(pool, scoring.window) if fp8 is None else None
        self.capabilities = Capabilities(
            pushes=True,
            sharing=rule,
            step_graphs=True,
            sharing_graphs=rule is not None,
            verify_graphs=True,
            reads=True,
            sliding_graphs=scoring.window is None,
        )
        self._options = {
            "q_data_type": dtype,
            "sm_scale": scoring.scale,
            "window_left": -1 if scoring.window is None else scoring.window - 1,  # without the token itself
            "logits_soft_cap": scoring.softcap,
        }
        # FlashInfer widens 8 bits to float16, which holds each of them, in less time than to bfloat16.
        self._paged_dtype = dtype if fp8 is None else torch.float16
        self._paged_options = {**self._options, "q_data_type": self._paged_dtype, "kv_data_type": pool.dtype}
        self._before_tree_options = {**self._paged_options, "window_left": -1}  # plan_parts leaves what all nodes see
        self._layers = [pool[:, layer].unbind(1) for layer in range(pool.shape[1])]
        flashinfer, workspace = load_flashinfer(), self._workspace
        self._plan_decode: Any = flashinfer.decode.fast_decode_plan
        self._prefill: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        # For a few tokens of each sequence fa2 is faster than fa3: 438 instead of 571 µs for 32 × 64 after 4096.
        self._before_trees: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        self._gathered: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self._decode: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        # fa3 cannot split the keys of a segment, and one segment's queries are too few to occupy a GPU.
        self._shared: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        self._shared_workspace = torch.empty_like(self._graph_workspace)
        self._prompts_workspace = torch.empty(PROMPTS_PLAN_BYTES, dtype=torch.uint8, device=pool.device)

    def plan(self, tokens: TokenLayout, tables: PageTables) -> EagerPlan:
        single = tokens.single
        prompts = ~single & ~tokens.in_trees
        gather_from = GATHER_FROM if self._fp8 is None else GATHER_FP8_FROM
        gathered = int(np.diff(tokens.qo_indptr)[prompts].sum()) >= gather_from
        groups = [(single, False), (prompts, gathered)]
        slots, parts = plan_parts(tokens, tables, groups, self._pool.shape[4], self._pool.device, self.scoring.window)
        return EagerPlan(AppendTargets(slots, None), parts)

    def buffers(self, limits: Limits, tables: DeviceTables) -> "DecodeSteps | KVBuffers":
        sizes, targets = self._sizes(limits.num_q_heads), AppendTargets(tables.slots, None)
        if limits.sliding:
            return SlidingSteps(targets, self, tables)
        if not limits.one_each:
            workspaces = (self._workspace, self._prompts_workspace)
            return PromptBuffers(targets, self, FixedPrompts.make(workspaces, tables, sizes, self._paged_options))
        if not limits.sharing:
            return DecodeSteps(self, DecodePlan.make(tables, *sizes[:3]))
        size, max_pages = limits.num_sequences, tables.kv_indices.shape[0] // limits.num_sequences
        num_rows = FixedSharing.num_rows(size, *sizes[:3], WORKSPACE_BYTES)
        fixed = FixedSharing(self._workspace, self._shared_workspace, size, num_rows, max_pages)
        fixed.plan_largest(sizes, self._paged_options)
        wrapper = self._fixed_wrapper(tables, limits.num_q_heads)
        return SharingBuffers(targets, self, wrapper, fixed, limits.num_q_heads)

    def largest_prompt(self, num_sequences: int, num_q_heads: int) -> int:
        return largest_prompt(self._workspace, num_sequences, self._sizes(num_q_heads))

    def largest_sharing_step(self, num_q_heads: int) -> int:
        return largest_decode(WORKSPACE_BYTES, self._sizes(num_q_heads))

    def plan_read(self, tokens: TokenLayout, tables: PageTables, *, causal: bool) -> EagerPlan:
        """Plans one part of all sequences, which share nothing."""
        apart, everyone = replace(tables, shared=None), np.ones(tokens.seq_lens.size, np.bool_)
        slots, parts = plan_parts(tokens, apart, [(everyone, False)], self._pool.shape[4], self._pool.device)
        return EagerPlan(AppendTargets(slots, None), parts, causal=causal)

    def read_part(self, own: EagerPlan, layer: int, q: Tensor) -> Part:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

        def attend(part: AttentionPart, its_q: Tensor) -> Tensor:
            wrapper = self._decode if part.single else self._prefill
            o, found = self._run_pages(wrapper, layer, its_q, with_lse=True)
            assert found is not None
            lse.copy_(found) if part.tokens is None else lse.index_copy_(0, part.tokens, found)
            return o

        output = self.attend_parts(own, q, q.shape[2], attend)
        return Part(output, lse.mul_(math.log(2)))

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, own: EagerPlan, sinks: Tensor | None = None
    ) -> Tensor:
        return self.attend_parts(own, q, q.shape[2], lambda part, its_q: self._attend_part(layer, part, its_q, sinks))

    def _attend_part(self, layer: int, part: AttentionPart, q: Tensor, sinks: Tensor | None) -> Tensor:
        if part.trees is not None:
            context, lse = self._run_pages(self._before_trees, layer, q, with_lse=True)
            assert lse is not None
            scales = self._scales(layer)
            return attend_trees(self._pool, layer, q, context, lse, part.trees, self.scoring, sinks, scales)
        if part.kv_slots is not None:
            return _add_sinks(_run(self._gathered, q, self._gather(layer, part.kv_slots), sinks is not None), sinks)
        if part.shared is not None:
            return self._attend_shared(self._decode, self._shared, part.shared, layer, q, sinks)
        return self._attend_pages(self._decode if part.single else self._prefill, layer, q, sinks)

    def _attend_pages(
        self, wrapper: Any, layer: int, q: Tensor, sinks: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        return _add_sinks(self._run_pages(wrapper, layer, q, with_lse=sinks is not None, out=out), sinks)

    def _attend_shared(
        self, decode: Any, shared: Any, part: SharedPart, layer: int, q: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """decode: the wrapper that was planned with the sequences' own pages; shared: the one planned with `part`."""
        own = self._run_pages(decode, layer, q, with_lse=True)
        of_shared = self._run_pages(shared, layer, q.index_select(0, part.queries), with_lse=True)
        return merge_parts(own, of_shared, part.begins, part.found_in, sinks)

    def _run_pages(
        self, wrapper: Any, layer: int, q: Tensor, *, with_lse: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """out: see QKV; entries of 8 bits do not use it."""
        pages, fp8 = self._layers[layer], self._fp8
        if fp8 is None:
            return _run(wrapper, q, (pages,), with_lse, out=out)
        scales = fp8.of_all_heads[layer]
        if scales is not None:
            queries = q.to(self._paged_dtype)
            output, lse = _run(wrapper, queries, (pages,), with_lse, k_scale=scales[0], v_scale=scales[1])
            return output.to(q.dtype), lse
        output, lse = _run(wrapper, fp8.scale_queries(layer, q).to(self._paged_dtype), (pages,), with_lse)
        return fp8.scale_output(layer, output.to(q.dtype)), lse

    def _fixed_wrapper(self, tables: DeviceTables, num_q_heads: int) -> Any:
        size = tables.slots.shape[0]
        wrapper = load_flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=tables.kv_indptr,
            paged_kv_indices_buffer=tables.kv_indices,
            paged_kv_last_page_len_buffer=tables.kv_last_page_len,
        )
        wrapper.reset_workspace_buffer(self._workspace, self._graph_workspace)
        ones = torch.ones(size, dtype=torch.int32)
        indptr = torch.arange(size + 1, dtype=torch.int32)
        wrapper.plan(indptr, ones * 0, ones, *self._sizes(num_q_heads), **self._paged_options)
        return wrapper

    def _plan_part(self, part: AttentionPart, num_q_heads: int, *, causal: bool) -> None:
        tables, sizes = (part.kv_indptr, part.kv_indices, part.kv_last_page_len), self._sizes(num_q_heads)
        if part.kv_slots is not None:
            self._gathered.plan(part.qo_indptr, part.kv_indptr, *sizes[:3], causal=True, **self._options)
            return
        if part.shared is not None:
            part.shared.plan(self._shared, sizes, self._paged_options)
        if part.single:
            self._decode.plan(*tables, *sizes, **self._paged_options)
        elif part.trees is not None:
            self._before_trees.plan(part.qo_indptr, *tables, *sizes, causal=False, **self._before_tree_options)
        else:
            self._prefill.plan(part.qo_indptr, *tables, *sizes, causal=causal, **self._paged_options)


@dataclass(frozen=True, eq=False)
class PromptBuffers(KVBuffers):
    """Prompt chunks in a CUDA graph by FlashInfer, whose wrapper plans each forward anew."""

    kernels: FlashInferKernels
    prompts: FixedPrompts

    def plan(self, tokens: TokenLayout, tables: PageTables) -> None:
        self.kernels._planned.synchronize()
        self.prompts.plan(tokens.qo_indptr, tables.kv_indptr, tables.kv_last_page_len)
        self.kernels._planned.record()

    def attend(
        self, layer: int, q: Tensor, rotation: Rotation | None, sinks: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        return self.kernels._attend_pages(self.prompts.wrapper, layer, q, sinks, out)


@dataclass(frozen=True, eq=False)
class SharingBuffers(KVBuffers):
    """A decode step in a CUDA graph by FlashInfer, where sequences share pages: a wrapper of its own that reads the
    arrays where they stand.

    wrapper: of what each sequence has of its own. sharing: of what they attend to together.
    """

    kernels: FlashInferKernels
    wrapper: Any
    sharing: FixedSharing
    num_q_heads: int

    def plan(self, tokens: TokenLayout, tables: PageTables) -> None:
        """The full plan() of the wrapper chose the kernel; this only shares out the work anew."""
        of, sizes = self.kernels, self.kernels._sizes(self.num_q_heads)
        indptr, indices, last_page_len = (
            torch.from_numpy(array) for array in (tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len)
        )
        of._planned.synchronize()
        of._plan_decode(
            *(self.wrapper, indptr, indices, last_page_len, *sizes),
            **of._paged_options,
            global_override_indptr_cpu=indptr,
        )
        self.sharing.refill(tables.shared, sizes, of._paged_options)
        of._planned.record()

    def takes_shared(self, shared: SharedPrefixes) -> bool:
        return self.sharing.fits(shared)

    def attend(
        self, layer: int, q: Tensor, rotation: Rotation | None, sinks: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        shared = self.sharing.wrapper, self.sharing.part
        return self.kernels._attend_shared(self.wrapper, *shared, layer, q, sinks)


def _run(
    wrapper: Any, q: Tensor, kv: tuple[Any, ...], with_lse: bool, out: Tensor | None = None, **scales: float
) -> tuple[Tensor, Tensor | None]:
    """Runs the planned wrapper on q and the pair of paged K and V, or K and V. Returns o, and with_lse their
    log-sum-exp, float32 [n, num_q_heads], of base 2. out: where o is written; None: new memory. scales: k_scale and
    v_scale of entries of 8 bits."""
    if with_lse:
        return wrapper.run(q, *kv, out=out, return_lse=True, **scales)
    return wrapper.run(q, *kv, out=out, **scales), None


def _add_sinks(of_keys: tuple[Tensor, Tensor | None], sinks: Tensor | None) -> Tensor:
    """A sink scales a head's output by the share of the softmax that the keys keep: e^lse / (e^lse + e^sink)."""
    output, lse = of_keys
    if sinks is None or lse is None:
        return output
    kept = torch.sigmoid(lse * math.log(2) - sinks.float())
    return output.mul_(kept.unsqueeze(-1).to(output.dtype))
