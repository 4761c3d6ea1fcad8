"""A decode step whose arrays stand at fixed places on the device: what a CUDA graph can be captured with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.rotations import Rotations
from tandem.cache.kernels.base import (
    DeviceTables,
    GraphKernels,
    LatentStepKernels,
    OpenStepKernels,
    PageKernels,
    SharingGraphKernels,
    StepKernels,
    StepPages,
)
from tandem.cache.kernels.fetched_staging import FetchedStaging
from tandem.cache.kernels.staging import ArraySize, FixedArrays
from tandem.cache.plan.arrays import Int64Array, IntArray
from tandem.cache.plan.head_norm import HeadNorm
from tandem.cache.plan.latent import UpProjections
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.stored_layers import StoredLayers
from tandem.cache.plan.tables import PageTables, TokenLayout, lay_out_tokens

SKIP_SLOT = -1  # append leaves such a token out


@dataclass(frozen=True, eq=False)
class StepAttention:
    """What PagedKVCache.attention and latent_attention are for a forward, for a fixed batch; norm: q's and k's, before
    they are rotated.

    kernels, plans, rotations and stored: per layer group, the last of a forward whose layers may be sent. places: of
    each layer its group, and its index there.
    """

    kernels: Sequence[GraphKernels]
    plans: Sequence[Any]
    rotations: Sequence[Rotation | None]
    places: Mapping[int, tuple[int, int]]
    stored: Sequence[StoredLayers | None] = ()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
        norm: HeadNorm | None = None,
    ) -> Tensor:
        group, index = self.places[layer]
        kernels = self.kernels[group]
        assert isinstance(kernels, StepKernels)  # the layer keeps K and V
        output = kernels.step(index, q, k, v, self.rotations[group], self.plans[group], sinks, norm)
        stored = self.stored[group] if self.stored else None
        if stored is not None:
            stored.note(index)
        return output

    def step_pages(self) -> StepPages | None:
        """For a kernel of all layers; None where it must not do without attend()."""
        if len(self.kernels) > 1 or not isinstance(self.kernels[0], OpenStepKernels):
            return None
        return self.kernels[0].step_pages(self.plans[0], self.rotations[0])

    def attend_latents(self, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections) -> Tensor:
        group, index = self.places[layer]
        kernels = self.kernels[group]
        assert isinstance(kernels, LatentStepKernels)  # the layer keeps latents
        return kernels.step_latents(index, q, latents, keys, self.rotations[group], self.plans[group], up)


class FixedBatch:
    """One new token each of up to `size` sequences. Rows without a sequence are padding: they store nothing, read the
    first position of page 0, and what they compute means nothing.

    sharing: rows that share pages attend to them together, as the tables that fill() is given say.

    attention() is called where the graph is captured, before all else, and fill() before each replay. inputs: int64
    [size] tensors that the caller has filled along with the batch's own arrays, num_inputs of them.
    """

    def __init__(
        self,
        size: int,
        kernels: Sequence[GraphKernels],
        rotations: Rotations,
        places: Mapping[int, tuple[int, int]],
        *,
        num_q_heads: int,
        num_inputs: int,
        max_pages: int,
        staging: FetchedStaging,
        sharing: bool,
    ) -> None:
        """places: see StepAttention. max_pages: of one sequence.

        staging: of at least FixedBatch.num_bytes(…); batches may share one.
        """
        self.size = size
        self.sharing = sharing
        self._kernels = kernels
        self._rotations = rotations
        self._places = places
        sizes = _sizes(size, len(kernels), num_inputs, max_pages)
        self._arrays = FixedArrays(staging, sizes)
        self._fetch = partial(staging.fetch, FixedArrays.num_bytes(sizes))
        heads, tables = self._arrays.tensors[: num_inputs + 1], self._arrays.tensors[num_inputs + 1 :]
        self._positions, *self.inputs = heads
        self._plans = [
            (one.fixed_sharing_plan if sharing and can_share(one) else one.fixed_plan)(
                DeviceTables(*tables[4 * group : 4 * group + 4]), num_q_heads
            )
            for group, one in enumerate(kernels)
        ]

    @staticmethod
    def num_bytes(size: int, num_groups: int, num_inputs: int, max_pages: int) -> int:
        return FixedArrays.num_bytes(_sizes(size, num_groups, num_inputs, max_pages))

    def attention(self) -> "StepAttention":
        """Of the step that was filled in last when it runs; this fetches its arrays, the inputs too, and computes the
        rotation of its positions."""
        self._fetch()
        return StepAttention(self._kernels, self._plans, self._rotations.at(self._positions), self._places)

    def clear(self) -> None:
        """Makes all rows padding."""
        nothing = np.empty(0, np.int64)
        empty = np.empty(0, np.int32)
        tables = PageTables(empty, np.zeros(1, np.int32), empty, empty, empty)
        self.fill(lay_out_tokens(nothing, nothing), [tables] * len(self._kernels), [nothing] * len(self.inputs))

    def takes(self, shared: Sequence[SharedPrefixes | None]) -> bool:
        """Whether this batch, a sharing one, has room for what the sequences of a step share in each group."""
        return all(
            one is None or (can_share(kernels) and kernels.takes_shared(plan, one))
            for kernels, plan, one in zip(self._kernels, self._plans, shared, strict=True)
        )

    def fill(self, tokens: TokenLayout, tables: Sequence[PageTables], inputs: Sequence[Int64Array]) -> None:
        """The step that the next replay computes: one token each of n ≤ size sequences; inputs int64 [n]."""
        self.prepare(tokens, tables, inputs)
        self._arrays.send()

    def send(self, inputs: Sequence[Int64Array]) -> None:
        """What was prepared, but with these first inputs, is the step that the next replay computes."""
        self._arrays.put(1, inputs)
        self._arrays.send()

    def prepare(self, tokens: TokenLayout, tables: Sequence[PageTables], inputs: Sequence[Int64Array]) -> None:
        """fill(), for send() to end; no batch that shares this one's staging is filled between."""
        missing = self.size - tokens.positions.size
        padded = [pad_tables(one, missing) for one in tables]
        for kernels, plan, one in zip(self._kernels, self._plans, padded, strict=True):
            kernels.refill(plan, one)
        arrays: list[np.ndarray] = [pad(array, missing, 0) for array in (tokens.positions, *inputs)]
        for one in padded:
            arrays += [one.slot_mapping, one.kv_indptr, one.kv_last_page_len, one.kv_indices]
        self._arrays.prepare(arrays)


def make_fixed_batches(
    sizes: Sequence[int],
    kernels: Sequence[PageKernels],
    rotations: Rotations,
    places: Mapping[int, tuple[int, int]],
    *,
    num_q_heads: int,
    num_inputs: int,
    max_pages: int,
    sharing: bool,
) -> list[FixedBatch]:
    """See PagedKVCache.fixed_batches; max_pages as in FixedBatch."""
    fit = [one for one in kernels if isinstance(one, GraphKernels)]
    if len(fit) < len(kernels) or rotations.by_length or not sizes or (sharing and not any(map(can_share, fit))):
        return []
    staging = FetchedStaging(FixedBatch.num_bytes(max(sizes), len(fit), num_inputs, max_pages), rotations.device)
    return [
        FixedBatch(
            size,
            fit,
            rotations,
            places,
            num_q_heads=num_q_heads,
            num_inputs=num_inputs,
            max_pages=max_pages,
            staging=staging,
            sharing=sharing,
        )
        for size in sizes
    ]


def can_share(kernels: PageKernels) -> TypeGuard[SharingGraphKernels]:
    return isinstance(kernels, SharingGraphKernels) and kernels.sharing is not None


def pad_tables(tables: PageTables, count: int) -> PageTables:
    """`count` more sequences, which store nothing and attend to one position of page 0."""
    if count == 0:
        return tables
    ends = tables.kv_indptr[-1] + np.arange(1, count + 1, dtype=np.int32)
    return PageTables(
        slot_mapping=pad(tables.slot_mapping, count, SKIP_SLOT),
        kv_indptr=np.concatenate((tables.kv_indptr, ends)),
        kv_indices=pad(tables.kv_indices, count, 0),
        kv_last_page_len=pad(tables.kv_last_page_len, count, 1),
        kv_lens=pad(tables.kv_lens, count, 1),
        shared=tables.shared,
    )


def pad(array: IntArray, count: int, value: int) -> IntArray:
    """`count` times `value` more; several times as fast as numpy's pad."""
    return np.concatenate((array, np.full(count, value, array.dtype))) if count else array


def _sizes(size: int, num_groups: int, num_inputs: int, max_pages: int) -> list[ArraySize]:
    """Positions and inputs; for each group slots, kv_indptr, kv_last_page_len and kv_indices."""
    of_group = [size, size + 1, size, size * max_pages]
    return [(size, torch.int64)] * (1 + num_inputs) + [(count, torch.int32) for count in of_group] * num_groups
