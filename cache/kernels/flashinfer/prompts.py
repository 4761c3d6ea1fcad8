"""Attention of prompts in a CUDA graph on a GPU: FlashInfer's prefill over the pages, planned before each replay."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import DeviceTables
from tandem.cache.kernels.flashinfer.wrappers import prefill_in_graph
from tandem.cache.plan.arrays import Int32Array

TILE_ROWS = 128  # queries times heads of a KV head that one of FlashInfer's blocks takes, at most


@dataclass(frozen=True, eq=False)
class FixedPrompts:
    """A wrapper of its own that reads the arrays where they stand; what it makes of tokens of padding is zeros.

    sizes: query heads, KV heads, head_dim, page size.
    """

    wrapper: Any
    kv_indices: Tensor
    sizes: tuple[int, int, int, int]
    options: dict[str, Any]

    @classmethod
    def make(
        cls,
        workspaces: tuple[Tensor, Tensor],
        tables: DeviceTables,
        sizes: tuple[int, int, int, int],
        options: dict[str, Any],
    ) -> "FixedPrompts":
        """workspaces: of all that runs, and of the planning of prompts in graphs."""
        assert tables.qo_indptr is not None  # sequences of a prompt have any number of tokens
        num_tokens = tables.slots.shape[0]
        arrays = tables.qo_indptr, tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len
        backend = choose_backend(num_tokens, sizes[0], workspaces[0].device)
        wrapper = prefill_in_graph(*workspaces, arrays, backend)
        prompts = cls(wrapper, tables.kv_indices, sizes, options)
        prompts._plan_largest(num_tokens, tables.kv_last_page_len.shape[0])
        return prompts

    def _plan_largest(self, num_tokens: int, num_sequences: int) -> None:
        """FlashInfer takes the tokens of the first plan for the most that will come."""
        first = np.arange(num_sequences + 1, dtype=np.int32) > 0  # one sequence has all
        num_pages = np.int32(-(-num_tokens // self.sizes[3]))
        self.plan(first * np.int32(num_tokens), first * num_pages, np.ones(num_sequences, np.int32))

    def plan(self, qo_indptr: Int32Array, kv_indptr: Int32Array, kv_last_page_len: Int32Array) -> None:
        indptr, last_page_len = torch.from_numpy(kv_indptr), torch.from_numpy(kv_last_page_len)
        longest = int(np.diff(qo_indptr).max())  # spares FlashInfer a loop in Python
        self.wrapper.plan(
            torch.from_numpy(qo_indptr),
            *(indptr, self.kv_indices[: int(kv_indptr[-1])], last_page_len, *self.sizes),
            causal=True,
            max_token_per_sequence=longest,
            **self.options,
        )


def choose_backend(num_tokens: int, num_q_heads: int, device: torch.device) -> str:
    """Returns FlashInfer's fastest backend if the queries of so many tokens occupy a third of the GPU. Else fa2,
    which splits the keys of few queries over the whole GPU. For 32 tokens after 32K, Qwen3-0.6B took 2.5 ms with
    fa2, and 13.9 ms with fa3."""
    tiles = -(-num_tokens // TILE_ROWS) * num_q_heads
    return "auto" if 3 * tiles >= num_multiprocessors(device) else "fa2"


def largest_prompt(workspace: Tensor, num_sequences: int, sizes: tuple[int, int, int, int]) -> int:
    """Returns the most prompt tokens for which FlashInfer's workspace has room while it splits keys. 0 if there is no
    room for two tiles a multiprocessor. sizes: see FixedPrompts."""
    num_q_heads, num_kv_heads, head_dim, _ = sizes
    tiles = workspace.numel() // (num_q_heads * TILE_ROWS * (head_dim + 1) * 4)
    if tiles < 2 * num_multiprocessors(workspace.device) // num_kv_heads:
        return 0
    return max(tiles - num_sequences, 0) * TILE_ROWS * num_kv_heads // num_q_heads


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
