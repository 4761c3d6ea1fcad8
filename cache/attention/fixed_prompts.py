"""A forward of prompts whose arrays stand at fixed places on the device: what a CUDA graph can be captured with."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tandem.cache.attention.fixed_batch import SKIP_SLOT, StepAttention, pad
from tandem.cache.attention.rotations import Rotations
from tandem.cache.kernels.base import PageKernels, PromptGraphKernels, PromptTables
from tandem.cache.kernels.staging import ArraySize, CopiedStaging, FixedArrays, Staging
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.stored_layers import StoredLayers
from tandem.cache.plan.tables import PageTables, TokenLayout, lay_out_tokens


class FixedPrompts:
    """The next tokens, `size` together at most, of up to num_sequences sequences. What is missing is padding: tokens of
    no sequence, which store nothing, and sequences of no token.

    attention() is called where the graph is captured, before all else, and fill() before each replay. token_ids: int64
    [size]; last_rows: int64 [num_sequences], the rows whose logits are wanted; both are filled along.
    """

    def __init__(
        self,
        size: int,
        num_sequences: int,
        kernels: Sequence[PromptGraphKernels],
        rotations: Rotations,
        places: Mapping[int, tuple[int, int]],
        *,
        num_q_heads: int,
        num_pages: int,
        page_size: int,
        stored: Sequence[StoredLayers | None],
        staging: Staging,
    ) -> None:
        """places, stored: see StepAttention. num_pages: of all sequences together, at most. staging: of at least
        FixedPrompts.num_bytes(…)."""
        self.size = size
        self.num_sequences = num_sequences
        self._kernels = kernels
        self._rotations = rotations
        self._places = places
        self._page_size = page_size
        self._stored = stored
        self._arrays = FixedArrays(staging, _sizes(size, num_sequences, len(kernels), num_pages))
        self._positions, self.token_ids, self.last_rows, qo_indptr, *tables = self._arrays.tensors
        self._plans = [
            one.fixed_prompts_plan(PromptTables(qo_indptr, *tables[4 * group : 4 * group + 4]), num_q_heads)
            for group, one in enumerate(kernels)
        ]

    @staticmethod
    def num_bytes(size: int, num_sequences: int, num_groups: int, num_pages: int) -> int:
        return FixedArrays.num_bytes(_sizes(size, num_sequences, num_groups, num_pages))

    def attention(self) -> StepAttention:
        """Of the forward that was filled in last when it runs; this computes the rotation of its positions."""
        rotations = self._rotations.at(self._positions)
        return StepAttention(self._kernels, self._plans, rotations, self._places, self._stored)

    def clear(self) -> None:
        """As many tokens as there may be, of a sequence that stores nothing and reads page 0 again and again."""
        size, nothing = self.size, np.zeros(self.size, np.int64)
        count = -(-size // self._page_size)
        tables = PageTables(
            slot_mapping=np.full(size, SKIP_SLOT, np.int32),
            kv_indptr=np.array([0, count], np.int32),
            kv_indices=np.zeros(count, np.int32),
            kv_last_page_len=np.array([size - (count - 1) * self._page_size], np.int32),
            kv_lens=np.array([size], np.int32),
        )
        tokens = lay_out_tokens(nothing[:1], nothing[:1] + size)
        self.fill(tokens, [tables] * len(self._kernels), nothing, nothing[:0])

    def fill(
        self, tokens: TokenLayout, tables: Sequence[PageTables], token_ids: Int64Array, last_rows: Int64Array
    ) -> None:
        """What the next replay computes: token_ids int64 [n], n ≤ size, and last_rows of their logits, no more than
        there are sequences."""
        absent = self.num_sequences - tokens.seq_lens.size
        qo_indptr = _extended(tokens.qo_indptr, absent)
        padded = [_pad_prompts(one, absent, self.size - token_ids.size) for one in tables]
        for kernels, plan, one in zip(self._kernels, self._plans, padded, strict=True):
            kernels.refill_prompts(plan, qo_indptr, one)
        arrays: list[np.ndarray] = [tokens.positions, token_ids, last_rows]
        widths = self.size, self.size, self.num_sequences
        arrays = [pad(array, width - array.size, 0) for array, width in zip(arrays, widths, strict=True)]
        arrays.append(qo_indptr)
        for one in padded:
            arrays += [one.slot_mapping, one.kv_indptr, one.kv_last_page_len, one.kv_indices]
        self._arrays.fill(arrays)


def make_fixed_prompts(
    sizes: Sequence[int],
    num_sequences: int,
    kernels: Sequence[PageKernels],
    rotations: Rotations,
    places: Mapping[int, tuple[int, int]],
    *,
    num_q_heads: int,
    max_pages: int,
    page_size: int,
    stored: Sequence[StoredLayers | None],
) -> list[FixedPrompts]:
    """See PagedKVCache.fixed_prompts. max_pages: of one sequence."""
    fit = [one for one in kernels if isinstance(one, PromptGraphKernels)]
    if len(fit) < len(kernels) or rotations.by_length:
        return []
    num_pages = num_sequences * max_pages
    most = min(num_pages * page_size, *(one.most_prompt_tokens(num_sequences, num_q_heads) for one in fit))
    sizes = [size for size in sizes if size <= most]
    num_bytes = FixedPrompts.num_bytes(max(sizes, default=0), num_sequences, len(fit), num_pages)
    staging = CopiedStaging(num_bytes, rotations.device)
    return [
        FixedPrompts(
            size,
            num_sequences,
            fit,
            rotations,
            places,
            num_q_heads=num_q_heads,
            num_pages=num_pages,
            page_size=page_size,
            stored=stored,
            staging=staging,
        )
        for size in sizes
    ]


def _pad_prompts(tables: PageTables, absent: int, missing: int) -> PageTables:
    """`absent` more sequences, of no page, and `missing` more tokens, which are not stored."""
    return PageTables(
        slot_mapping=pad(tables.slot_mapping, missing, SKIP_SLOT),
        kv_indptr=_extended(tables.kv_indptr, absent),
        kv_indices=tables.kv_indices,
        kv_last_page_len=pad(tables.kv_last_page_len, absent, 1),
        kv_lens=pad(tables.kv_lens, absent, 1),
    )


def _extended(indptr: Int32Array, count: int) -> Int32Array:
    """`count` more pieces, of nothing."""
    return pad(indptr, count, int(indptr[-1]))


def _sizes(size: int, num_sequences: int, num_groups: int, num_pages: int) -> list[ArraySize]:
    """Positions, token ids, last rows and qo_indptr; for each group slots, kv_indptr, kv_last_page_len, kv_indices."""
    counts = [size, num_sequences + 1, num_sequences, num_pages]
    heads = [(size, torch.int64), (size, torch.int64), (num_sequences, torch.int64), (num_sequences + 1, torch.int32)]
    return heads + [(count, torch.int32) for count in counts] * num_groups
