"""Attention of prompts in a CUDA graph on a GPU: FlashInfer's prefill over the pages, planned before each replay."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import PromptTables
from tandem.cache.kernels.triton_append import AppendTargets
from tandem.cache.plan import PageTables
from tandem.cache.position_map import Int32Array

TILE_ROWS = 128  # queries times heads of a KV head that one of FlashInfer's blocks takes, at most
BACKEND = "fa2"  # it splits the keys of a few queries over the GPU, as fa3 does not


@dataclass(frozen=True, eq=False)
class FixedPromptsPlan:
    """A wrapper of its own that reads the arrays where they stand; what it makes of tokens of padding is zeros.

    sizes: query heads, KV heads, head_dim, page size.
    """

    targets: AppendTargets
    wrapper: Any
    kv_indices: Tensor
    sizes: tuple[int, int, int, int]
    options: dict[str, Any]
    keep_k: bool = False

    @classmethod
    def make(
        cls,
        flashinfer: Any,
        workspaces: tuple[Tensor, Tensor],
        tables: PromptTables,
        sizes: tuple[int, int, int, int],
        options: dict[str, Any],
    ) -> "FixedPromptsPlan":
        """workspaces: of all that runs, and of the planning of prompts in graphs."""
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspaces[0],
            "HND",
            use_cuda_graph=True,
            qo_indptr_buf=tables.qo_indptr,
            paged_kv_indptr_buf=tables.kv_indptr,
            paged_kv_indices_buf=tables.kv_indices,
            paged_kv_last_page_len_buf=tables.kv_last_page_len,
            backend=BACKEND,
        )
        wrapper.reset_workspace_buffer(*workspaces)
        plan = cls(AppendTargets(tables.slots, None), wrapper, tables.kv_indices, sizes, options)
        plan._plan_largest(tables.slots.shape[0], tables.kv_last_page_len.shape[0])
        return plan

    def refill(self, qo_indptr: Int32Array, tables: PageTables) -> None:
        self._plan(qo_indptr, tables.kv_indptr, tables.kv_last_page_len)

    def _plan_largest(self, num_tokens: int, num_sequences: int) -> None:
        """FlashInfer takes the tokens of the first plan for the most that will come."""
        first = np.arange(num_sequences + 1, dtype=np.int32) > 0  # one sequence has all
        num_pages = np.int32(-(-num_tokens // self.sizes[3]))
        self._plan(first * np.int32(num_tokens), first * num_pages, np.ones(num_sequences, np.int32))

    def _plan(self, qo_indptr: Int32Array, kv_indptr: Int32Array, kv_last_page_len: Int32Array) -> None:
        indptr, last_page_len = torch.from_numpy(kv_indptr), torch.from_numpy(kv_last_page_len)
        tables = indptr, self.kv_indices[: int(kv_indptr[-1])], last_page_len
        self.wrapper.plan(torch.from_numpy(qo_indptr), *tables, *self.sizes, causal=True, **self.options)


def most_prompt_tokens(workspace_bytes: int, num_sequences: int, sizes: tuple[int, int, int, int]) -> int:
    """As many as FlashInfer's workspace has room for while it splits keys; sizes: see FixedPromptsPlan."""
    num_q_heads, num_kv_heads, head_dim, _ = sizes
    tiles = workspace_bytes // (num_q_heads * TILE_ROWS * (head_dim + 1) * 4) - num_sequences
    return max(tiles, 0) * TILE_ROWS * num_kv_heads // num_q_heads
