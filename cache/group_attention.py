"""One layer group in a forward: its plan, what it pushes, and each of its layers' attention."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.batch_prefixes import BatchPrefixes, able_to_share
from tandem.cache.group_table import GroupTable
from tandem.cache.kernels.base import Kernels, PageKernels, PushingKernels, SharingKernels
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.page_writer import PageWriter
from tandem.cache.plan import GroupPlan, PageTables, Send, TokenLayout, look_up_pages, own_tables, slots_of
from tandem.cache.position_map import Int32Array
from tandem.cache.rope import Rotation
from tandem.cache.shared_prefixes import SharedPrefixes
from tandem.cache.stream_attention import StreamPart, attend_streams, no_output
from tandem.cache.window import Int64Array


class GroupForward:
    """kernels, window and table are those of group `group`."""

    def __init__(
        self,
        group: int,
        kernels: PageKernels,
        window: int | None,
        table: GroupTable,
        writer: PageWriter | None,
        page_size: int,
    ) -> None:
        self._group = group
        self.kernels = kernels
        self._window = window
        self._table = table
        self._writer = writer
        self._page_size = page_size
        rule = kernels.sharing if isinstance(kernels, SharingKernels) else None
        self._prefixes = BatchPrefixes(table, rule, page_size)

    def look_up(self, rows: Int64Array, tokens: TokenLayout) -> PageTables:
        """rows: int64 [B], those of the sequences that have grown by `tokens`."""
        begins = None if self._window is None else self._table.begins[rows]
        return look_up_pages(self._table.pages, rows, tokens, self._page_size, begins)

    def look_up_apart(self, rows: Int64Array, tokens: TokenLayout) -> PageTables:
        """look_up() of sequences with one new token each, without the pages that segments of its `shared` cover."""
        tables, shared = self.look_up(rows, tokens), self.shared(rows, tokens.seq_lens.astype(np.int64) - 1)
        if shared is None:
            return tables
        tables = replace(tables, shared=shared)
        return replace(own_tables(tables, np.arange(rows.size), self._page_size), shared=shared)

    def shared(
        self, rows: Int64Array, lengths: Int64Array, able: NDArray[np.bool_] | None = None
    ) -> SharedPrefixes | None:
        """See BatchPrefixes.find."""
        return self._prefixes.find(rows, lengths, able)

    def plan(
        self,
        rows: Int64Array,
        tokens: TokenLayout,
        rotation: Rotation | None,
        sends: tuple[Send, ...],
        streams: tuple[StreamPart, ...],
    ) -> GroupPlan:
        kernels, tables = self.kernels, self.look_up(rows, tokens)
        shared = self.shared(rows, tokens.seq_lens.astype(np.int64) - 1, able_to_share(tokens, streams))
        if shared is not None:
            tables = replace(tables, shared=shared)
        plan = kernels.plan(tokens, tables)
        if sends and isinstance(kernels, PushingKernels):
            assert self._writer is not None  # mark_send saw to it
            plan, sends = kernels.push_with_append(plan, sends, partial(self._writer.peer_pool, group=self._group))
        return GroupPlan(tables, rotation, sends, streams, plan)

    def push(self, plan: GroupPlan, layer: int, k: Tensor | None, v: Tensor | None) -> None:
        """What the kernels' append has left to the writer; see PageWriter for k and v."""
        if layer == 0:
            self.push_cached(plan.sends)
        for send in plan.sends:
            assert self._writer is not None
            if send.token_indices.shape[0]:
                assert k is not None  # append gives it where something is left
                self._writer.write_tokens(
                    send.target_pe, self._group, layer, k, v, send.token_indices, send.token_slots
                )

    def push_cached(self, sends: Sequence[Send]) -> None:
        """Their cached positions, of all layers."""
        for send in sends:
            assert self._writer is not None
            if send.source_slots.size:
                self._writer.write_slots(send.target_pe, self._group, send.source_slots, send.target_slots)

    def gather(self, layers: Sequence[int], row: int, indices: Int64Array) -> list[tuple[Tensor, Tensor]]:
        """What kernels.read_slots gives of each of `layers` at `indices` (int64 [n]) of a row."""
        slots: Int32Array = slots_of(self._table.pages[row], indices, self._page_size)
        return [self.kernels.read_slots(layer, slots) for layer in layers]


class GroupAttention(GroupForward):
    """A group that keeps K and V. fp8 is the group's; scoring is what sequences with a sliding window attend by."""

    kernels: Kernels

    def __init__(
        self,
        group: int,
        kernels: Kernels,
        table: GroupTable,
        writer: PageWriter | None,
        page_size: int,
        scoring: Scoring,
        fp8: Fp8Entries | None,
    ) -> None:
        super().__init__(group, kernels, scoring.window, table, writer, page_size)
        self._scoring = scoring
        self._fp8 = fp8

    def attend(self, plan: GroupPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """See PagedKVCache.attention; layer counts within the group."""
        q, k = self.kernels.append(layer, q, k, v, plan.rotation, plan.kernel_plan)
        if self._fp8 is None:
            self.push(plan, layer, k, v)
        elif any(send.token_indices.shape[0] for send in plan.sends):
            self.push(plan, layer, *self._fp8.quantise(layer, k, v))
        else:
            self.push(plan, layer, None, None)
        if not plan.streams:
            return self.kernels.attend(layer, q, k, v, plan.kernel_plan, sinks)
        if sum(part.end - part.begin for part in plan.streams) == q.shape[0]:
            output = no_output(q)
        else:  # what the kernels make of tokens of streams is replaced
            output = self.kernels.attend(layer, q, k, v, plan.kernel_plan, sinks)
        return attend_streams(output, plan.streams, q, partial(self.kernels.read_slots, layer), self._scoring, sinks)
