"""One layer group in a forward: its plan, what it pushes, and each of its layers' attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from tandem.cache.attention.batch_prefixes import BatchPrefixes, able_to_share
from tandem.cache.attention.encoder_views import see_encoder
from tandem.cache.attention.page_look_up import PageLookUp
from tandem.cache.attention.states import look_up_states, send_states
from tandem.cache.kernels.base import AttentionBackend, GroupPlan, Query
from tandem.cache.kernels.torch.sliding import SlidingParts
from tandem.cache.kinds.kind import ServedKind, Site
from tandem.cache.pages.group_table import GroupTable
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.local_chunks import split_by_chunks
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.rope import Rotation
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.stored_layers import StoredLayers
from tandem.cache.plan.tables import NO_WRITES, PageTables, Send, StateWrites, TokenLayout, own_tables


@dataclass(eq=False)
class GroupAttention:
    """Attention in the group at `site`, whose layers keep entries of `kind`."""

    kind: ServedKind
    site: Site
    backend: AttentionBackend[Any]
    table: GroupTable
    writer: PageWriter | None
    stored: StoredLayers | None  # on a GPU, where what the group stores may be sent
    encoder_lens: Int64Array | None = None  # by row, of a layout with an encoder; see SequenceTable

    def __post_init__(self) -> None:
        self.group, keeps = self.site.index, self.kind.keeps
        self.chunk, self.drops_past, self.given = keeps.chunk, keeps.drops_past, keeps.given
        # Chunks end what sequences have in common; after a border none begins with the first page index.
        shares = self.chunk is None and self.encoder_lens is None
        self.prefixes = BatchPrefixes(self.table, self.backend.capabilities.sharing if shares else None)
        self.tables = PageLookUp(self.table, self.chunk)
        self.whole = self.table.paging.whole
        # Cached entries go before the first layer stores a new one, a state once the last layer has.
        self._last_layer = len(self.site.layout.groups[self.group].layers) - 1

    def check(self, num_tokens: int, x: Any) -> None:
        """See ServedKind.check_inputs."""
        self.kind.check_inputs(num_tokens, x, self.site)

    @property
    def shares_in_graphs(self) -> bool:
        can = self.backend.capabilities
        return can.sharing_graphs and self.prefixes.rule is not None

    def split(self, rows: Int64Array, tokens: TokenLayout) -> tuple[Int64Array, TokenLayout]:
        """The sequences of a forward as the group's kernels take them: see split_by_chunks and see_encoder. Of a group
        with an entry for several positions the new entries stand in place of tokens."""
        if self.given and self.encoder_lens is not None:
            return see_encoder(rows, tokens, self.encoder_lens)
        if self.table.every > 1:
            return rows, tokens.entries(self.table.every)
        return (rows, tokens) if self.chunk is None else split_by_chunks(rows, tokens, self.chunk)

    def look_up(self, rows: Int64Array, tokens: TokenLayout, shared: SharedPrefixes | None = None) -> PageTables:
        """See PageLookUp.look_up; of a group with states see look_up_states."""
        if self.whole:
            return look_up_states(self.tables.look_up, rows, tokens)
        return self.tables.look_up(rows, tokens, shared)

    def look_up_apart(self, rows: Int64Array, tokens: TokenLayout) -> PageTables:
        """The tables of sequences with one new token each, without the pages that segments of their `shared` cover."""
        shared = self.prefixes.find(rows, tokens.seq_lens)
        tables = self.look_up(rows, tokens, shared)
        if shared is None:
            return tables
        return replace(own_tables(tables, np.arange(rows.size), self.table.page_size), shared=shared)

    def plan(
        self,
        rows: Int64Array,
        tokens: TokenLayout,
        rotation: Rotation | None,
        sends: tuple[Send, ...],
        sliding: SlidingParts | None,
        writes: StateWrites = NO_WRITES,
        *,
        drafted: bool = False,
        encodes: bool = False,
    ) -> GroupPlan:
        """writes: snapshots of states. drafted: see Batch. encodes: these are an encoder's tokens, kept here."""
        shared = None
        if self.prefixes.rule is not None:
            shared = self.prefixes.find(rows, tokens.seq_lens, able_to_share(tokens, sliding))
        rows, tokens = (rows, tokens) if encodes else self.split(rows, tokens)
        tables = self.look_up(rows, tokens, shared)
        if self.whole:
            tables = replace(tables, writes=writes, drafted=drafted)
        own = self.backend.plan(tokens, tables)
        if self.whole:
            sends = send_states(sends, tokens, tables.kv_indices)
        if sends and (encodes or not self.given) and self.backend.capabilities.pushes:
            assert self.writer is not None  # mark_send saw to it
            peer_pool = partial(self.writer.peer_pool, group=self.group)
            own, sends = self.backend.push_with_append(own, sends, peer_pool)
        return GroupPlan(own, rotation, tables, sends, sliding, tokens, tokens.positions.size, self.stored)

    def run(self, plan: GroupPlan, layer: int, x: Any) -> Tensor:
        """See AttentionBackend.run; pushes what the plan sends."""
        if not plan.captured:
            hooked = plan.sends or plan.stored is not None
            return self.backend.run(plan, layer, x, partial(self._appended, plan, layer) if hooked else None)
        output = plan.own.run(plan, layer, x)
        if plan.stored is not None:  # after attention: between two kernels that overlap an event would part them
            plan.stored.note(layer)
        return output

    def store(self, plan: GroupPlan, layer: int, k: Tensor, v: Tensor) -> None:
        """See AttentionBackend.store_kv; pushes what the plan sends."""
        hooked = plan.sends or plan.stored is not None
        self.backend.store_kv(plan, layer, k, v, partial(self._appended, plan, layer) if hooked else None)

    def appended(self, plan: GroupPlan, layer: int, k: Tensor, v: Tensor | None) -> None:
        """Pushes what the plan sends, as run() does, after a kernel for several groups has stored the entries."""
        if plan.sends or plan.stored is not None:
            self._appended(plan, layer, k, v)

    def read(self, plan: GroupPlan, layer: int, x: Query) -> Tensor:
        """See AttentionBackend.read. No layer stores an encoder's entries now. All are cached, so it pushes those
        that the plan sends."""
        if self.given and layer == 0 and plan.sends:
            self.push_cached(plan.sends)
        return (plan.own if plan.captured else self.backend).read(plan, layer, x)

    def _appended(self, plan: GroupPlan, layer: int, k: Tensor | None, v: Tensor | None) -> None:
        """Takes note of a stored layer, and pushes what append has left to the writer; see PageWriter for k and v."""
        if plan.stored is not None:
            plan.stored.note(layer)
        if not plan.sends:
            return
        if layer == (self._last_layer if self.whole or plan.pushes_late else 0):
            self.push_cached(plan.sends)
        left = [send for send in plan.sends if send.token_indices.shape[0]]
        if not left:
            return
        assert k is not None  # append gives it where something is left
        assert self.writer is not None
        if self.site.fp8 is not None and v is not None:
            k, v = self.site.fp8.quantise(layer, k, v)
        for send in left:
            self.writer.write_tokens(send.target_pe, self.group, layer, k, v, send.token_indices, send.token_slots)

    def push_cached(self, sends: Sequence[Send], *, staged: bool = False) -> None:
        """Pushes the cached positions of the sends, page to page. staged: the forward launched last stores the last
        positions. So each layer may go as soon as it is stored."""
        stages = self.stored.stages if staged and self.stored is not None else ()
        for send in sends:
            assert self.writer is not None
            if send.source_slots.size:
                self.writer.write_slots(send.target_pe, self.group, send.source_slots, send.target_slots, stages)

    def gather(self, layers: Sequence[int], row: int, indices: Int64Array) -> list[tuple[Tensor, Tensor]]:
        """Reads the slots of `indices` (int64 [n]) of a row in each of `layers`, see read_slots()."""
        slots = self.table.slots(row, indices)
        return [self.backend.read_slots(layer, slots) for layer in layers]
