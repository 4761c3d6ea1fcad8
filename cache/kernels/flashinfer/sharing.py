"""Decode attention on a GPU where sequences share pages: FlashInfer over each segment's queries, merged with the rest.

All segments, whatever their level, are one call of FlashInfer's prefill attention: a segment is a request with its
members' queries. Another call attends to each sequence's own pages, and one kernel merges. FlashInfer's own cascade, a
call for each level by fa3, took 2.8 times as long (docs/decisions/0023).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.flashinfer.wrappers import prefill_in_graph
from tandem.cache.kernels.staging import CopiedStaging, FixedArrays
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array, IntArray, indptr_of
from tandem.cache.plan.shared_prefixes import SharedPrefixes, SharingRule

MOST_SEGMENTS = 16  # in a CUDA graph
DECODE_TILES = 16, 64, 128  # as MOST_TILE_ROWS, of rows with one token: the least that holds a row's
MOST_TILE_ROWS = 128  # queries times heads of a KV head that one of FlashInfer's blocks takes
# Bytes of K and V, of one layer, that sharing must save to pay for itself, and each segment. tests/benchmarks/
# shared_prefix.py on an H200: it costs 11 us more to begin with, and what is read again comes from the L2 cache as long
# as it fits there, so that 64 sequences break even at some 830 common positions of Qwen3-8B.
SAVED_BYTES = 208 << 20
SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class SharedPart:
    """The shared pages that a decode of n sequences attends to, one segment after another, int32.

    The indptrs are on the host, as FlashInfer's planning wants them, the others on the device. queries: [R], rows of q.
    begins [n + 1], found_in [R]: see merge_parts. Only the first qo_indptr[-1] of R count.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    queries: Tensor
    begins: Tensor
    found_in: Tensor

    @classmethod
    def of(cls, shared: SharedPrefixes, single: NDArray[np.bool_], device: torch.device) -> "SharedPart":
        """single: bool [B], the sequences with one new token, whose rows of q follow each other."""
        arrays = _merge_order(shared, np.cumsum(single) - 1, int(single.sum()))
        indptrs = torch.from_numpy(shared.qo_indptr), torch.from_numpy(shared.kv_indptr)
        return cls(*indptrs, *upload((shared.kv_indices, *arrays), device))

    def plan(self, wrapper: Any, sizes: tuple[int, int, int, int], options: dict[str, Any]) -> None:
        """sizes: query heads, KV heads, head_dim, page size."""
        full = torch.full((self.kv_indptr.shape[0] - 1,), sizes[3], dtype=torch.int32)
        wrapper.plan(self.qo_indptr, self.kv_indptr, self.kv_indices, full, *sizes, causal=False, **options)


class FixedSharing:
    """SharedParts at fixed addresses on the device, one after another, for a decode step in a CUDA graph."""

    def __init__(self, workspace: Tensor, own_workspace: Tensor, size: int, num_rows: int, max_pages: int) -> None:
        """Makes room for `size` sequences of max_pages, with num_rows queries of all segments together.

        own_workspace: of FlashInfer's planning; not that of the wrapper that runs at the same time.
        """
        device = workspace.device
        counts = [num_rows, size + 1, num_rows, MOST_SEGMENTS * max_pages]
        sizes = [(count, torch.int32) for count in counts]
        self._arrays = FixedArrays(CopiedStaging(FixedArrays.num_bytes(sizes), device), sizes)
        self._size, self._num_rows = size, num_rows
        indptrs = torch.zeros((2, MOST_SEGMENTS + 1), dtype=torch.int32, device=device)
        ones = torch.ones(MOST_SEGMENTS, dtype=torch.int32, device=device)
        arrays = (*indptrs, self._arrays.tensors[3], ones)
        self.wrapper = prefill_in_graph(workspace, own_workspace, arrays, "fa2")
        self.part = self._part(*np.zeros((2, MOST_SEGMENTS + 1), np.int32))

    @staticmethod
    def num_rows(size: int, num_q_heads: int, num_kv_heads: int, head_dim: int, workspace_bytes: int) -> int:
        """Returns the most queries that FlashInfer's workspace allows, up to two levels for each sequence."""
        tiles = workspace_bytes // (num_q_heads * MOST_TILE_ROWS * head_dim * 4) - MOST_SEGMENTS
        return max(min(2 * size, tiles * MOST_TILE_ROWS * num_kv_heads // num_q_heads), MOST_SEGMENTS)

    def fits(self, shared: SharedPrefixes) -> bool:
        return shared.qo_indptr.size <= MOST_SEGMENTS + 1 and shared.members.size <= self._num_rows

    def plan_largest(self, sizes: tuple[int, int, int, int], options: dict[str, Any]) -> None:
        """Plans the most queries that there may be, of one page each. FlashInfer takes the first plan's number for the
        most that will come."""
        qo_indptr, kv_indptr = np.ones((2, MOST_SEGMENTS + 1), np.int32)
        qo_indptr[0] = kv_indptr[0] = 0
        self._part(qo_indptr * np.int32(self._num_rows), kv_indptr).plan(self.wrapper, sizes, options)

    def refill(self, shared: SharedPrefixes | None, sizes: tuple[int, int, int, int], options: dict[str, Any]) -> None:
        """Makes these segments, which fit, the next to run. Sequence i of the batch has row i of q. None: no row of the
        output has a part from shared pages."""
        if shared is None:
            self._arrays.fill([np.empty(0, np.int32), np.zeros(self._size + 1, np.int32)])
            self.plan_largest(sizes, options)  # another batch's plan may stand in the workspace that they share
            return
        missing = MOST_SEGMENTS + 1 - shared.qo_indptr.size
        qo_indptr, kv_indptr = (np.pad(a, (0, missing), "edge") for a in (shared.qo_indptr, shared.kv_indptr))
        self._arrays.fill([*_merge_order(shared, np.arange(self._size), self._size), shared.kv_indices])
        self._part(qo_indptr, kv_indptr).plan(self.wrapper, sizes, options)

    def _part(self, qo_indptr: NDArray[np.int32], kv_indptr: NDArray[np.int32]) -> SharedPart:
        *merged, kv_indices = self._arrays.tensors
        indptrs = torch.from_numpy(qo_indptr), torch.from_numpy(kv_indptr)
        return SharedPart(*indptrs, kv_indices[: int(kv_indptr[-1])], *merged)


def largest_decode(workspace_bytes: int, sizes: tuple[int, int, int, int]) -> int:
    """Rows of a decode step in a CUDA graph that FlashInfer's prefill kernels compute, and split keys of, at most: the
    workspace has partial outputs for a tile of queries a row, and for all rows' queries once more. sizes: see
    SharedPart.plan."""
    num_q_heads, num_kv_heads, head_dim, _ = sizes
    queries = num_q_heads // num_kv_heads  # of a row, for a KV head
    tile = next((rows for rows in DECODE_TILES if queries <= rows), DECODE_TILES[-1])
    tiles = workspace_bytes // (num_q_heads * tile * (head_dim + 1) * 4)
    return tiles * tile // (tile + queries)


def _merge_order(
    shared: SharedPrefixes, queries_of: IntArray, num_queries: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """queries, begins and found_in of a SharedPart. queries_of: [B], the row of q, of num_queries, that each sequence
    of a segment has."""
    queries = queries_of[shared.members].astype(np.int32)
    found_in = queries.argsort(kind="stable").astype(np.int32)
    return queries, indptr_of(np.bincount(queries, minlength=num_queries)), found_in


def sharing_rule(pool: Tensor, window: int | None) -> SharingRule | None:
    """See Capabilities.sharing."""
    if window is not None:
        return None
    page_bytes = pool[0, 0].numel() * pool.element_size()
    return SharingRule(-(-SEGMENT_BYTES // page_bytes), -(-SAVED_BYTES // page_bytes))
