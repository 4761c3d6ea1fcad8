"""One layer group in a forward: its plan, what it pushes, and each of its layers' attention."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.attention.batch_prefixes import BatchPrefixes, able_to_share
from tandem.cache.attention.forward_plan import GroupPlan
from tandem.cache.attention.page_look_up import PageLookUp
from tandem.cache.attention.stream_attention import StreamParts, no_output
from tandem.cache.kernels.base import Kernels, PageKernels, PushingKernels, SharingKernels
from tandem.cache.kernels.fp8_entries import Fp8Entries
from tandem.cache.kernels.scoring import Scoring
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.attention_inputs import AttentionInputs
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.stored_layers import StoredLayers
from tandem.cache.plan.tables import PageTables, Send, TokenLayout, own_tables, slots_of


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
        stored: StoredLayers | None,
    ) -> None:
        """stored: of the group, on a GPU, where what it stores may be sent."""
        self._group = group
        self.kernels = kernels
        self.stored = stored
        self._table = table
        self._writer = writer
        self._page_size = page_size
        rule = kernels.sharing if isinstance(kernels, SharingKernels) else None
        self._tables = PageLookUp(table, window, page_size)
        self._prefixes = BatchPrefixes(table, rule, page_size)
        self._pushing = kernels if isinstance(kernels, PushingKernels) else None  # asking for a protocol is slow

    def look_up(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None = None) -> PageTables:
        """rows: int64 [B], those of the sequences that have grown by `tokens`."""
        return self._tables.look_up(rows, tokens, shared)

    def look_up_apart(self, rows: Int64Array, tokens: TokenLayout) -> PageTables:
        """look_up() of sequences with one new token each, without the pages that segments of its `shared` cover."""
        shared = self.shared(rows, tokens.seq_lens)
        tables = self.look_up(rows, tokens, shared)
        return (
            tables
            if shared is None
            else replace(own_tables(tables, np.arange(rows.size), self._page_size), shared=shared)
        )

    def shared(
        self, rows: Int64Array, seq_lens: Int32Array, able: NDArray[np.bool_] | None = None
    ) -> SharedPrefixes | None:
        """See BatchPrefixes.find."""
        return self._prefixes.find(rows, seq_lens, able)

    def plan(
        self,
        rows: Int64Array,
        tokens: TokenLayout,
        rotation: Rotation | None,
        sends: tuple[Send, ...],
        streams: StreamParts | None,
    ) -> GroupPlan:
        shared = None
        if self._prefixes.rule is not None:
            shared = self.shared(rows, tokens.seq_lens, able_to_share(tokens, streams))
        tables = self.look_up(rows, tokens, shared)
        plan = self.kernels.plan(tokens, tables)
        if sends and self._pushing is not None:
            assert self._writer is not None  # mark_send saw to it
            peer_pool = partial(self._writer.peer_pool, group=self._group)
            plan, sends = self._pushing.push_with_append(plan, sends, peer_pool)
        return GroupPlan(tables, rotation, sends, streams, plan)

    def push(self, plan: GroupPlan, layer: int, k: Tensor | None, v: Tensor | None) -> None:
        """Behind a layer's append: what that has left to the writer; see PageWriter for k and v."""
        if self.stored is not None:
            self.stored.note(layer)
        if layer == 0:
            self.push_cached(plan.sends)
        for send in plan.sends:
            assert self._writer is not None
            if send.token_indices.shape[0]:
                assert k is not None  # append gives it where something is left
                self._writer.write_tokens(
                    send.target_pe, self._group, layer, k, v, send.token_indices, send.token_slots
                )

    def push_cached(self, sends: Sequence[Send], *, staged: bool = False) -> None:
        """Their cached positions, page to page. staged: the forward launched last stored the last of them, so that
        layers may go as soon as it has."""
        stages = self.stored.stages if staged and self.stored is not None else ()
        for send in sends:
            assert self._writer is not None
            if send.source_slots.size:
                self._writer.write_slots(send.target_pe, self._group, send.source_slots, send.target_slots, stages)

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
        inputs: AttentionInputs,
        stored: StoredLayers | None,
    ) -> None:
        super().__init__(group, kernels, scoring.window, table, writer, page_size, stored)
        self._inputs = inputs
        self._scoring = scoring
        self._fp8 = fp8

    def attend(self, plan: GroupPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """See PagedKVCache.attention; layer counts within the group."""
        self._inputs.check(plan.tables.slot_mapping.size, q, k, v, sinks)
        q, k = self.kernels.append(layer, q, k, v, plan.rotation, plan.kernel_plan)
        if self._fp8 is None:
            self.push(plan, layer, k, v)
        elif any(send.token_indices.shape[0] for send in plan.sends):
            self.push(plan, layer, *self._fp8.quantise(layer, k, v))
        else:
            self.push(plan, layer, None, None)
        streams = plan.streams
        if streams is None:
            return self.kernels.attend(layer, q, k, v, plan.kernel_plan, sinks)
        if int((streams.ends - streams.begins).sum()) == q.shape[0]:
            output = no_output(q)
        else:  # what the kernels make of tokens of streams is replaced
            output = self.kernels.attend(layer, q, k, v, plan.kernel_plan, sinks)
        return streams.attend(output, q, partial(self.kernels.read_slots, layer), self._scoring, sinks)
