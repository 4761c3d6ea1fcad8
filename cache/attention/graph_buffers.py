"""Graph buffers: the arrays of a forward at fixed addresses on the device, where a CUDA graph reads them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.compressed_tokens import TokenForward, has_by_token
from tandem.cache.attention.forward import Attention, LayerIndex
from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.attention.rotations import Rotations
from tandem.cache.kernels.base import NO_TABLES, DeviceTables, GroupPlan, Limits
from tandem.cache.kernels.choice import choose_row_shift
from tandem.cache.kernels.fetched_staging import FetchedStaging
from tandem.cache.kernels.staging import ArraySize, CopiedStaging, FixedArrays, Staging
from tandem.cache.kernels.torch.sliding import SlidingRows
from tandem.cache.pages.sequence_table import SequenceTable, ids_of
from tandem.cache.plan.arrays import Int64Array, IntArray
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.spans import Span
from tandem.cache.plan.tables import EntryLayout, PageTables, TokenLayout, lay_out_tokens, look_up_pages

SKIP_SLOT = -1  # append leaves such a token out


class GraphBuffers:
    """Hold one forward within `limits`. What is missing is padding, which stores nothing and means nothing.

    A row of padding in a decode step reads the first position of page 0. Prompts are padded with tokens of no sequence
    and with sequences of no token. attention() is called where the graph is captured, before all else, and
    PagedKVCache.begin fills the buffers before each replay.
    """

    def __init__(
        self,
        limits: Limits,
        groups: Sequence[GroupAttention],
        rotations: Rotations,
        layers: LayerIndex,
        table: SequenceTable,
        staging: Staging,
    ) -> None:
        """staging: of at least GraphBuffers.num_bytes(…); several buffers may share one."""
        self.limits = limits
        self._groups = groups
        self._rotations = rotations
        self._layers = layers
        self._table = table
        self._page_size, max_pages = table.page_size, table.groups[0].pages.shape[1]
        of_groups = [limits.in_chunks(group.chunk) for group in groups]
        sizes = _sizes(limits, [group.kind.keeps for group in groups], max_pages)
        self._arrays = FixedArrays(staging, sizes)
        self._fetch = partial(staging.fetch, FixedArrays.num_bytes(sizes))
        self._shift_rows = choose_row_shift(self._arrays.tensors[0].device)
        end = 1 + len(limits.inputs)
        self.positions, *self.inputs = self._arrays.tensors[:end]  # int64, those that the caller fills along
        self._room = [own.num_sequences for own in of_groups]
        self._tables = list[DeviceTables]()
        for group in groups:
            begin, end = end, end + len(_group_sizes(limits, group.kind.keeps, max_pages))
            self._tables.append(_device_tables(self._arrays.tensors[begin:end], limits, group.kind.keeps))
        self._buffers = [
            group.backend.buffers(own if group.shares_in_graphs else own.without_sharing(), tables)
            for tables, group, own in zip(self._tables, groups, of_groups, strict=True)
        ]

    @staticmethod
    def num_bytes(limits: Limits, spans: Sequence[Span], max_pages: int) -> int:
        """spans: of each layer group."""
        return FixedArrays.num_bytes(_sizes(limits, spans, max_pages))

    @property
    def size(self) -> int:
        return self.limits.num_tokens

    @property
    def preceding(self) -> Tensor:
        """int32 [size], of a verify step: see DeviceTables."""
        preceding = self._tables[0].preceding
        assert preceding is not None, "the buffers are of a verify step"
        return preceding

    def fetch(self) -> None:
        """Brings the arrays of the forward that was filled in last to their places; attention() does, unless told."""
        self._fetch()

    def attention(
        self, *, by_layers: bool = False, shift: Callable[[], Tensor] | None = None, fetched: bool = False
    ) -> Attention:
        """Returns the attention of the forward that was filled in last when it runs. On the device this fetches its
        arrays, and computes the rotation of its positions. by_layers: each layer will call attend(), whatever
        step_pages() could do.

        shift: called once the arrays are there; int32 [size], how many positions earlier than they say each row of a
        verify step or of a chain stands, 0 for padding. See shifts_rows. fetched: the arrays are in their
        places, where a step of a chain before this one may have moved them.
        """
        if not fetched:
            self.fetch()
        if shift is not None:
            by = shift()
            self.positions.sub_(by)
            for tables in self._tables:
                self._shift_rows(tables, by, self._page_size)
        for buffers in self._buffers:
            buffers.begin_captured(by_layers)
        noted = [None if self.limits.one_each else group.stored for group in self._groups]
        plans = [
            GroupPlan(own, rotation, num_tokens=self.size, stored=stored, captured=True)
            for own, rotation, stored in zip(self._buffers, self._rotations.at(self.positions), noted, strict=True)
        ]
        by_token = None
        if has_by_token(self._groups):
            by_token = TokenForward.of_buffers(self._groups, plans, self._tables, self.positions, self._rotations.at)
        return Attention(self._groups, plans, self._layers, None, lambda: self.positions, by_token=by_token)

    def clear(self) -> None:
        """Makes all rows of a decode step padding. Of prompts: as many tokens as there may be, of as few sequences as
        can have them, which store nothing and read page 0 again and again."""
        longest, nothing = self._table.max_length, np.empty(0, np.int64)
        tokens = lay_out_tokens(nothing, nothing).apart()
        tables = replace(NO_TABLES, kv_indptr=np.zeros(1, np.int32))
        if not self.limits.one_each:
            begins = np.arange(0, self.size, longest)
            tokens = lay_out_tokens(np.zeros_like(begins), np.minimum(self.size - begins, longest))
            pages = np.zeros((1, -(-longest // self._page_size)), np.int32)
            tables = look_up_pages(pages, np.zeros_like(begins), tokens, self._page_size)
            tables = replace(tables, slot_mapping=np.full(self.size, SKIP_SLOT, np.int32))
        groups = len(self._groups)
        ways = SlidingRows(*[nothing] * 6, still=0) if self.limits.sliding else None
        self.prepare([tokens] * groups, [tables] * groups, [nothing] * len(self.inputs), ways)
        self._arrays.send()

    @property
    def shifts_rows(self) -> bool:
        """Whether the device may find the sequences of a verify step in these buffers shorter than they were planned.
        The positions that this leaves over are popped afterwards.

        Not where pages leave a window or a chunk, for these follow from the length, nor with compressed KV or an
        encoder, nor with kernels that the host plans for the lengths.
        """
        bound = any(group.drops_past or group.given or group.chunk is not None for group in self._groups)
        return not bound and not self._layers.compressed and all(g.backend.capabilities.shifts for g in self._groups)

    def pays_to_share(self, seq_ids: Sequence[int] | Int64Array) -> bool:
        """Whether the next step of these sequences is faster in these buffers, for sharing, than in others."""
        rows = self._table.rows(ids_of(seq_ids))
        seq_lens = self._table.lengths[rows].astype(np.int32) + 1
        shared = [group.prefixes.find(rows, seq_lens) for group in self._groups]
        return any(one is not None for one in shared) and self._takes_shared(shared)

    def _takes_shared(self, shared: Sequence[SharedPrefixes | None]) -> bool:
        """Whether there is room for what the sequences of a step share in each group."""
        return all(
            one is None or (group.shares_in_graphs and buffers.takes_shared(one))
            for group, buffers, one in zip(self._groups, self._buffers, shared, strict=True)
        )

    def prepare(
        self,
        layouts: Sequence[TokenLayout],
        tables: Sequence[PageTables],
        inputs: Sequence[Int64Array],
        ways: SlidingRows | None = None,
    ) -> None:
        """The forward that the next replay computes, once send() ends this; none that shares its staging is prepared
        between. layouts, tables: of each layer group, see GroupAttention.split. inputs: first elements of the
        buffers' inputs. ways: of all rows, where limits.sliding."""
        limits, positions = self.limits, layouts[0].positions
        missing = limits.num_tokens - positions.size
        if limits.one_each:
            tables = [pad_tables(one, missing, missing, 1) for one in tables] if missing else tables
        else:
            absent = [room - one.seq_lens.size for room, one in zip(self._room, layouts, strict=True)]
            layouts = [pad_layout(one, count) for one, count in zip(layouts, absent, strict=True)]
            tables = [pad_tables(one, missing, count, 0) for one, count in zip(tables, absent, strict=True)]
            self._arrays.open()  # a plan's own copies come before these: what a backend copied last is gone, too
        for buffers, tokens, one in zip(self._buffers, layouts, tables, strict=True):
            buffers.plan(tokens, one)
        if ways is not None:  # K and q of a row that slides are not rotated when K is stored
            positions = np.where(ways.indices == ways.still, positions, ways.still)
        arrays: list[np.ndarray] = [positions, *inputs]
        if missing or not limits.one_each:
            widths = limits.num_tokens, *limits.inputs
            arrays = [pad(one, width - one.size, 0) for one, width in zip(arrays, widths, strict=True)]
        for group, layout, one in zip(self._groups, layouts, tables, strict=True):
            tokens = layouts[0] if isinstance(layout, EntryLayout) else layout  # rows, which entries are not
            arrays += [one.slot_mapping, one.kv_indptr, one.kv_last_page_len, one.kv_indices]
            if limits.runs:
                assert tokens.preceding is not None, "rows of a verify step stand apart"
                arrays.append(pad(tokens.preceding, missing, 0))
            elif ways is not None:
                arrays.append(ways.packed(limits.num_sequences))
            elif not limits.one_each:
                arrays.append(tokens.qo_indptr)
            if group.whole:
                kept = np.full(limits.num_sequences, SKIP_SLOT, np.int32)
                kept[one.writes.sequences] = one.writes.pages
                arrays.append(kept)
        self._arrays.prepare(arrays)

    def send(self, inputs: Sequence[Int64Array] = ()) -> None:
        """Makes the prepared forward, with these first inputs, the one that the next replay computes."""
        self._arrays.put(1, inputs)
        self._arrays.send()


def make_graph_buffers(
    limits: Sequence[Limits],
    groups: Sequence[GroupAttention],
    rotations: Rotations,
    layers: LayerIndex,
    table: SequenceTable,
) -> list[GraphBuffers]:
    """See PagedKVCache.graph_buffers."""
    max_pages, page_size = table.groups[0].pages.shape[1], table.page_size
    compressed = {group for of in layers.compressed.values() for group in of}
    stored_apart = layers.beside.keys() - compressed  # by the caller, who knows no graph
    fit = (
        []
        if rotations.by_length or stored_apart
        else [one for one in limits if _fits(one, groups, max_pages * page_size)]
    )
    if not fit:
        return []
    spans = [group.kind.keeps for group in groups]
    num_bytes = max(GraphBuffers.num_bytes(one, spans, max_pages) for one in fit)
    staging = (FetchedStaging if fit[0].one_each else CopiedStaging)(num_bytes, rotations.device)
    return [GraphBuffers(one, groups, rotations, layers, table, staging) for one in fit]


def _fits(limits: Limits, groups: Sequence[GroupAttention], max_length: int) -> bool:
    encoder = any(group.given for group in groups)
    if encoder and (limits.sliding or not limits.one_each):
        return False
    if limits.one_each:
        capabilities = [group.backend.capabilities for group in groups]
        if limits.sliding:
            return all(one.sliding_graphs for one in capabilities) and not any(group.drops_past for group in groups)
        able = all(one.verify_graphs if limits.runs else one.step_graphs for one in capabilities)
        if not able or not limits.sharing:
            return able
        largest = [group.backend.largest_sharing_step(limits.num_q_heads) for group in groups if group.shares_in_graphs]
        return limits.num_sequences <= min(largest, default=0)
    counts = [limits.in_chunks(group.chunk).num_sequences for group in groups]
    largest = (
        group.backend.largest_prompt(count, limits.num_q_heads) for group, count in zip(groups, counts, strict=True)
    )
    return limits.num_tokens <= min(limits.num_sequences * max_length, *largest)


def pad_layout(tokens: TokenLayout, sequences: int) -> TokenLayout:
    """Adds `sequences` sequences without a token."""
    return replace(tokens, qo_indptr=pad(tokens.qo_indptr, sequences, int(tokens.qo_indptr[-1])))


def pad_tables(tables: PageTables, tokens: int, sequences: int, pages: int) -> PageTables:
    """`tokens` more tokens, which are not stored, and `sequences` more, that have page 0 as often as `pages` says."""
    ends = tables.kv_indptr[-1] + np.arange(1, sequences + 1, dtype=np.int32) * np.int32(pages)
    return PageTables(
        slot_mapping=pad(tables.slot_mapping, tokens, SKIP_SLOT),
        kv_indptr=np.concatenate((tables.kv_indptr, ends)),
        kv_indices=pad(tables.kv_indices, sequences * pages, 0),
        kv_last_page_len=pad(tables.kv_last_page_len, sequences, 1),
        kv_lens=pad(tables.kv_lens, sequences, 1),
        shared=tables.shared,
        writes=tables.writes,
    )


def pad(array: IntArray, count: int, value: int) -> IntArray:
    """`count` times `value` more; several times as fast as numpy's pad."""
    return np.concatenate((array, np.full(count, value, array.dtype))) if count else array


def _sizes(limits: Limits, spans: Sequence[Span], max_pages: int) -> list[ArraySize]:
    """Positions and inputs, then the tables of each group."""
    sizes: list[ArraySize] = [(count, torch.int64) for count in (limits.num_tokens, *limits.inputs)]
    for span in spans:
        sizes += [(count, torch.int32) for count in _group_sizes(limits, span, max_pages)]
    return sizes


def _group_sizes(limits: Limits, span: Span, max_pages: int) -> list[int]:
    """Slots, kv_indptr, kv_last_page_len and kv_indices; then qo_indptr unless it is known, or `preceding` of a verify
    step, or `sliding` of a step in which sequences may; then `kept` of states."""
    sequences = limits.in_chunks(span.chunk).num_sequences
    sizes = [limits.num_tokens, sequences + 1, sequences, sequences * (1 if span.last else max_pages)]
    if limits.runs:
        sizes.append(sequences)
    elif limits.sliding:
        sizes.append(6 * sequences)
    elif not limits.one_each:
        sizes.append(sequences + 1)
    return [*sizes, sequences] if span.last else sizes


def _device_tables(arrays: Sequence[Tensor], limits: Limits, span: Span) -> DeviceTables:
    """Makes one group's tables from arrays in the order of _group_sizes()."""
    kept, rest = (arrays[-1], arrays[:-1]) if span.last else (None, arrays)
    four, fifth = rest[:4], rest[4] if len(rest) > 4 else None
    if limits.sliding:
        return DeviceTables(*four, sliding=fifth, kept=kept)
    if limits.runs:
        return DeviceTables(*four, preceding=fifth, kept=kept)
    return DeviceTables(*four, qo_indptr=fifth, kept=kept)
