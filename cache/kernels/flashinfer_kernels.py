"""Kernels of a pool on a CUDA device: attention by FlashInfer, append by Triton. The only importer of flashinfer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.errors import InvalidArgument
from tandem.cache.kernels.base import DeviceTables, PeerPool
from tandem.cache.kernels.flashinfer_sharing import FixedSharing, SharedArrays, SharedPart, sharing_rule
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.triton_append import AppendTargets, append
from tandem.cache.kernels.triton_gather import gather
from tandem.cache.kernels.upload import upload
from tandem.cache.plan import PageTables, Send, TokenLayout, own_tables
from tandem.cache.position_map import Int32Array
from tandem.cache.ragged import indptr_of, ragged_range
from tandem.cache.rope import Rotation
from tandem.cache.shared_prefixes import SharedPrefixes

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (8, 16, 32, 64)
WORKSPACE_BYTES = 256 << 20
GATHER_FROM = 1024  # new tokens from which attention over gathered K and V is faster, the gathering included
GRAPH_WORKSPACE_BYTES = 8 << 20  # FlashInfer's own size; one step's plan is in it at a time


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """Some sequences of a forward, all with one new token each or all with several.

    tokens: int64 [n], on the device, theirs among the packed ones; None: all. qo_indptr, kv_indptr, kv_last_page_len:
    FlashInfer's arrays, int32, on the host, where its planning reads them; kv_indices on the device. kv_slots: int32,
    on the device, of all positions that they attend to, where these are gathered first; kv_indptr then counts them.
    shared: further pages of theirs, which they attend to together.
    """

    single: bool
    tokens: Tensor | None
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    kv_slots: Tensor | None
    shared: SharedPart | None


@dataclass(frozen=True, eq=False)
class FlashInferPlan:
    """keep_k: whether append returns K rotated, for a writer that takes it from there."""

    targets: AppendTargets
    keep_k: bool
    parts: tuple[AttentionPart, ...]


@dataclass(frozen=True, eq=False)
class FixedPlan:
    """A decode step in a CUDA graph: a wrapper of its own that reads the arrays where they stand.

    sharing: what sequences attend to together; the arrays are then of what each has of its own.
    """

    targets: AppendTargets
    wrapper: Any
    num_q_heads: int
    sharing: FixedSharing | None
    keep_k: bool = False


class FlashInferKernels:
    """See Kernels and GraphKernels. float16 and bfloat16, also stored as float8_e4m3fn, head_dim 64, 128 or 256, pages
    of 8 to 64 positions; else InvalidArgument.

    FlashInfer's wrappers hold the forward that was planned last, so they are planned when its first layer attends:
    forwards may be begun in any order, but a layer that goes back to an earlier one plans anew.
    """

    def __init__(
        self,
        pool: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        fp8: Fp8Entries | None = None,
    ) -> None:
        """Takes 256 MiB of workspace on the pool's device. FlashInfer compiles what it needs on first use."""
        dtype = pool.dtype if fp8 is None else fp8.dtype
        _check(pool, dtype)
        import flashinfer  # pyright: ignore[reportMissingImports]  # comes with the extras cuda12 and cuda13

        self._pool = pool
        self.sharing = sharing_rule(pool, window)
        self._words = pool if fp8 is None else pool.view(torch.uint8)  # torch moves bytes, but not every 8-bit float
        self._fp8 = fp8
        self._dtype = dtype
        self._options = {
            "q_data_type": dtype,
            "sm_scale": scale,
            "window_left": -1 if window is None else window - 1,  # without the token itself
            "logits_soft_cap": softcap,
        }
        self._paged_options = {**self._options, "kv_data_type": pool.dtype}
        self._layers = [pool[:, layer].unbind(1) for layer in range(pool.shape[1])]
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._flashinfer: Any = flashinfer
        self._workspace = workspace
        self._graph_workspace = torch.empty(GRAPH_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._prefill: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        self._gathered: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self._decode: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        # fa3 cannot split the keys of a segment, and one segment's queries are too few to occupy a GPU.
        self._shared: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        self._shared_workspace = torch.empty_like(self._graph_workspace)
        self._current: FlashInferPlan | None = None
        self._planned = torch.cuda.Event()

    def plan(self, tokens: TokenLayout, tables: PageTables) -> FlashInferPlan:
        appends = np.diff(tokens.qo_indptr)
        single = appends == 1
        groups = [np.flatnonzero(single), np.flatnonzero(~single)]
        page_size = self._pool.shape[4]
        drafts = [_draft(tokens, tables, appends, sequences, page_size) for sequences in groups if sequences.size]
        of_parts = [(draft.kv_indices, draft.tokens, draft.kv_slots) for draft in drafts]
        arrays = [tables.slot_mapping, *(array for of_part in of_parts for array in of_part)]
        slots, *uploaded = upload(arrays, self._pool.device)
        shared = self._plan_shared(tables, single)
        parts = tuple(
            AttentionPart(
                draft.single,
                rows if len(drafts) > 1 else None,
                torch.from_numpy(draft.qo_indptr),
                torch.from_numpy(draft.kv_indptr),
                pages,
                torch.from_numpy(draft.kv_last_page_len),
                kv_slots if draft.kv_slots.size else None,
                shared if draft.single else None,
            )
            for draft, pages, rows, kv_slots in zip(drafts, uploaded[::3], uploaded[1::3], uploaded[2::3], strict=True)
        )
        return FlashInferPlan(AppendTargets(slots, None), keep_k=False, parts=parts)

    def _plan_shared(self, tables: PageTables, single: NDArray[np.bool_]) -> SharedPart | None:
        """single: bool [B], the sequences with one new token, whose rows of q follow each other."""
        if tables.shared is None:
            return None
        arrays = SharedArrays.of(tables.shared, np.cumsum(single) - 1, int(single.sum()))
        on_device = (arrays.kv_indices, arrays.queries, arrays.begins, arrays.places)
        return SharedPart(
            torch.from_numpy(arrays.qo_indptr),
            torch.from_numpy(arrays.kv_indptr),
            *upload(on_device, self._pool.device),
        )

    def push_with_append(
        self, plan: FlashInferPlan, sends: Sequence[Send], peer_pool: PeerPool
    ) -> tuple[FlashInferPlan, tuple[Send, ...]]:
        """See PushingKernels: all peers are written to by the one launch."""
        addresses = np.zeros(plan.targets.slots.shape[0], np.int64)
        left: list[Send] = []
        for send in sends:
            pool = peer_pool(send.target_pe) if send.token_indices.shape[0] else None
            if pool is None:
                left.append(send)
                continue
            addresses[send.token_indices.numpy()] = _row_addresses(pool, send.token_slots.numpy())
            if send.source_slots.size:
                left.append(replace(send, token_indices=send.token_indices[:0], token_slots=send.token_slots[:0]))
        peer_rows = upload([addresses], self._pool.device)[0] if addresses.any() else None
        keep_k = any(send.token_indices.shape[0] for send in left)
        return replace(plan, targets=replace(plan.targets, peer_rows=peer_rows), keep_k=keep_k), tuple(left)

    def fixed_plan(self, tables: DeviceTables, num_q_heads: int) -> FixedPlan:
        size = tables.slots.shape[0]
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
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
        return FixedPlan(AppendTargets(tables.slots, None), wrapper, num_q_heads, None)

    def fixed_sharing_plan(self, tables: DeviceTables, num_q_heads: int) -> FixedPlan:
        sizes, size = self._sizes(num_q_heads), tables.slots.shape[0]
        max_pages = tables.kv_indices.shape[0] // size
        num_rows = FixedSharing.num_rows(size, *sizes[:3], WORKSPACE_BYTES)
        fixed = FixedSharing(self._flashinfer, self._workspace, self._shared_workspace, size, num_rows, max_pages)
        fixed.plan_largest(sizes, self._paged_options)
        return replace(self.fixed_plan(tables, num_q_heads), sharing=fixed)

    def takes_shared(self, plan: FixedPlan, shared: SharedPrefixes) -> bool:
        return plan.sharing is not None and plan.sharing.fits(shared)

    def refill(self, plan: FixedPlan, tables: PageTables) -> None:
        """The full plan() of fixed_plan() chose the kernel; this only shares out the work anew."""
        indptr, indices, last_page_len = (
            torch.from_numpy(array) for array in (tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len)
        )
        self._planned.synchronize()
        self._flashinfer.decode.fast_decode_plan(
            *(plan.wrapper, indptr, indices, last_page_len, *self._sizes(plan.num_q_heads)),
            **self._paged_options,
            global_override_indptr_cpu=indptr,
        )
        if plan.sharing is not None:
            plan.sharing.refill(tables.shared, self._sizes(plan.num_q_heads), self._paged_options)
        self._planned.record()

    def append(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: FlashInferPlan | FixedPlan
    ) -> tuple[Tensor, Tensor]:
        """As Kernels says, but k comes back rotated only where plan.keep_k asks for it: attend reads the pages."""
        factors = None if self._fp8 is None else self._fp8.inverse[layer]
        return append(self._pool, layer, q, k, v, rotation, plan.targets, keep_k=plan.keep_k, fp8_factors=factors)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: FlashInferPlan | FixedPlan,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(plan, FixedPlan):
            attend: Callable[..., Tensor] = partial(_run, plan.wrapper)
            if plan.sharing is not None:
                attend = partial(plan.sharing.part.attend, plan.wrapper, plan.sharing.wrapper)
            return self._attend_pages(attend, layer, q, sinks)
        if plan is not self._current:
            self._plan_wrappers(plan, q.shape[1])
        if len(plan.parts) == 1:
            return self._attend_part(layer, plan.parts[0], q, sinks)
        output = torch.empty_like(q)
        for part in plan.parts:
            assert part.tokens is not None  # of several parts, each has some
            of_part = self._attend_part(layer, part, q.index_select(0, part.tokens), sinks)
            output.index_copy_(0, part.tokens, of_part)
        return output

    def _attend_part(self, layer: int, part: AttentionPart, q: Tensor, sinks: Tensor | None) -> Tensor:
        if part.kv_slots is not None:
            return _run(self._gathered, (q, *self._gather(layer, part.kv_slots)), sinks)
        attend: Callable[..., Tensor] = partial(_run, self._decode if part.single else self._prefill)
        if part.shared is not None:
            attend = partial(part.shared.attend, self._decode, self._shared)
        return self._attend_pages(attend, layer, q, sinks)

    def _attend_pages(self, attend: Callable[..., Tensor], layer: int, q: Tensor, sinks: Tensor | None) -> Tensor:
        """attend: _run of a wrapper, or what takes as much."""
        pages, fp8 = self._layers[layer], self._fp8
        if fp8 is None:
            return attend((q, pages), sinks)
        scales = fp8.of_all_heads[layer]
        if scales is not None:
            return attend((q, pages), sinks, k_scale=scales[0], v_scale=scales[1])
        return fp8.scale_output(layer, attend((fp8.scale_queries(layer, q), pages), sinks))

    def _gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [n, num_kv_heads, head_dim] at slots, int32 [n] on the device; entries of 8 bits widened."""
        scales = None if self._fp8 is None else self._fp8.scales[layer]
        k, v = gather(self._pool, layer, slots, self._dtype, scales).unbind(1)
        return k, v

    def copy_pages(self, sources: Int32Array, targets: Int32Array) -> None:
        source, target = upload([sources.astype(np.int64), targets.astype(np.int64)], self._pool.device)
        self._words.index_copy_(0, target, self._words.index_select(0, source))

    def clear_pages(self, pages: Int32Array) -> None:
        (index,) = upload([pages.astype(np.int64)], self._pool.device)
        self._words.index_fill_(0, index, 0)

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        return self._gather(layer, upload([slots], self._pool.device)[0])

    def _sizes(self, num_q_heads: int) -> tuple[int, int, int, int]:
        _, _, _, num_kv_heads, page_size, head_dim = self._pool.shape
        return num_q_heads, num_kv_heads, head_dim, page_size

    def _plan_wrappers(self, plan: FlashInferPlan, num_q_heads: int) -> None:
        # FlashInfer copies its plan from pinned memory that the next plan overwrites.
        self._planned.synchronize()
        for part in plan.parts:
            tables = (part.kv_indptr, part.kv_indices, part.kv_last_page_len)
            sizes = self._sizes(num_q_heads)
            if part.kv_slots is not None:
                self._gathered.plan(part.qo_indptr, part.kv_indptr, *sizes[:3], causal=True, **self._options)
                continue
            if part.shared is not None:
                part.shared.plan(self._shared, sizes, self._paged_options)
            if part.single:
                self._decode.plan(*tables, *sizes, **self._paged_options)
            else:
                self._prefill.plan(part.qo_indptr, *tables, *sizes, causal=True, **self._paged_options)
        self._planned.record()
        self._current = plan


def _run(wrapper: Any, inputs: tuple[Any, ...], sinks: Tensor | None, **scales: float) -> Tensor:
    """What the planned wrapper gives for its inputs: q and the pair of paged K and V, or q, K and V.

    scales: k_scale and v_scale of entries of 8 bits.

    A sink scales a head's output by the share of the softmax that the keys keep: e^lse / (e^lse + e^sink).
    """
    if sinks is None:
        return wrapper.run(*inputs, **scales)
    output, lse = wrapper.run(*inputs, return_lse=True, **scales)  # lse: float32 [n, num_q_heads], of base 2
    kept = torch.sigmoid(lse * math.log(2) - sinks.float())
    return output.mul_(kept.unsqueeze(-1).to(output.dtype))


@dataclass(frozen=True, eq=False)
class _Draft:
    single: bool
    tokens: NDArray[np.int64]
    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    kv_last_page_len: Int32Array
    kv_slots: Int32Array


def _draft(
    tokens: TokenLayout, tables: PageTables, appends: Int32Array, sequences: NDArray[np.int64], page_size: int
) -> _Draft:
    """An AttentionPart of `sequences` (int64 [n]), before anything is on the device; no kv_slots: not gathered."""
    appends = appends[sequences]
    tables = own_tables(tables, sequences, page_size)
    gathered = int(appends.max()) > 1 and int(appends.sum()) >= GATHER_FROM
    counts, pages, lengths = np.diff(tables.kv_indptr), tables.kv_indices, tables.kv_lens
    return _Draft(
        single=bool(appends[0] == 1),
        tokens=ragged_range(tokens.qo_indptr[sequences], appends),
        qo_indptr=indptr_of(appends),
        kv_indptr=indptr_of(lengths) if gathered else tables.kv_indptr,
        kv_indices=pages,
        kv_last_page_len=tables.kv_last_page_len,
        kv_slots=_all_slots(pages, counts, lengths, page_size) if gathered else pages[:0],
    )


def _all_slots(pages: Int32Array, counts: Int32Array, lengths: Int32Array, page_size: int) -> Int32Array:
    """Slots of the lengths[i] positions on counts[i] of `pages`, sequence after sequence."""
    slots = (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)
    begins = ((np.cumsum(counts) - counts) * page_size).astype(np.int32)
    return slots[ragged_range(begins, lengths)]


def _row_addresses(pool: Tensor, slots: Int32Array) -> NDArray[np.int64]:
    """See AppendTargets.peer_rows."""
    page_size = pool.shape[4]
    limit = pool.shape[0] * page_size
    if int(slots.min()) < 0 or int(slots.max()) >= limit:
        raise InvalidArgument(f"slots are {int(slots.min())} … {int(slots.max())}; 0 … {limit - 1} are accepted")
    pages, offsets = np.divmod(slots.astype(np.int64), page_size)
    return pool.data_ptr() + (pages * pool.stride(0) + offsets * pool.stride(4)) * pool.element_size()


def _check(pool: Tensor, dtype: torch.dtype) -> None:
    _, _, _, _, page_size, head_dim = pool.shape
    for name, value, accepted in (
        ("dtype", dtype, DTYPES),
        ("head_dim", head_dim, HEAD_DIMS),
        ("page_size", page_size, PAGE_SIZES),
    ):
        if value not in accepted:
            raise InvalidArgument(f"{name} is {value}; on a GPU it must be one of {', '.join(map(str, accepted))}")
    if pool.device.type != "cuda":
        raise InvalidArgument(f"the pool is on {pool.device}; it must be on a CUDA device")
