"""The states of a gated delta rule in pages, with torch operations: the reference."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import Appended, AttentionBackend, Capabilities, GroupPlan
from tandem.cache.kernels.recurrent import DeltaInputs, DeltaShape
from tandem.cache.kernels.torch.delta_rule import chunk_conv, chunk_delta_rule, step_conv, step_delta_rule, unit
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.tables import PageTables, StateWrites, TokenLayout


class Chunk(NamedTuple):
    """Tokens begin … end - 1 of a forward, all of one sequence. page: of the snapshot behind them; None: none."""

    sequence: int
    begin: int
    end: int
    page: int | None


class StatePlan(NamedTuple):
    """Of a forward of B sequences. pages: int64 [B]. is_new: bool [B, 1], whether nothing is behind a sequence yet, so
    that its page means nothing. singles, rows: int64 [n], the sequences with one new token, and that token. chunks: the
    others. kept: int64 [m], sequences whose states at the end of the forward are kept in kept_pages, int64 [m]."""

    pages: Tensor
    is_new: Tensor
    singles: Tensor
    rows: Tensor
    chunks: list[Chunk]
    kept: Tensor
    kept_pages: Tensor
    begins: Int64Array | None  # int64 [B], the first token of each sequence, of a forward with drafts; else None


class Drafted(NamedTuple):
    """The last forward with drafts. begins: int64 [B], the first token of each sequence. inputs: by layer."""

    begins: Int64Array
    inputs: dict[int, DeltaInputs]


def plan_chunks(sequences: Int64Array, begins: Int64Array, ends: Int64Array, writes: StateWrites) -> list[Chunk]:
    """The tokens begins[i] … ends[i] - 1 of sequences[i], cut where a snapshot is written before their end; int64 [n]
    each."""
    chunks = []
    for index, begin, end in zip(sequences.tolist(), begins.tolist(), ends.tolist(), strict=True):
        first = begin
        for which in (writes.sequences == index).nonzero()[0].tolist():
            at = first + int(writes.tokens[which])
            if at < end:
                chunks.append(Chunk(index, begin, at, int(writes.pages[which])))
                begin = at
        chunks.append(Chunk(index, begin, end, None))
    return chunks


class TorchDeltaKernels(AttentionBackend[DeltaInputs]):
    """A page is the entry of one sequence, see DeltaShape, in float32."""

    capabilities = Capabilities(trees=False)

    def __init__(self, pool: Tensor, shape: DeltaShape) -> None:
        super().__init__(pool)
        self._shape = shape
        self._entries = pool.flatten(2)  # [num_pages, layers, numbers]
        self._drafted: Drafted | None = None

    def clear_pages(self, pages: Int32Array) -> None:
        """Nothing: the first forward of a sequence does not read its page."""

    def plan(self, tokens: TokenLayout, tables: PageTables) -> StatePlan:
        indptr, writes = tokens.qo_indptr.astype(np.int64), tables.writes
        begins, counts = indptr[:-1], np.diff(indptr)
        is_new = torch.from_numpy(tokens.seq_lens == counts).unsqueeze(1)
        singles, others = (counts == 1).nonzero()[0], (counts > 1).nonzero()[0]
        at_end = writes.tokens == counts[writes.sequences]
        arrays = (tables.kv_indices, singles, begins[singles], writes.sequences[at_end], writes.pages[at_end])
        pages, of_singles, rows, kept, kept_pages = (torch.from_numpy(array.astype(np.int64)) for array in arrays)
        chunks = plan_chunks(others, begins[others], indptr[1:][others], writes)
        first_tokens = begins if tables.drafted else None
        return StatePlan(pages, is_new, of_singles, rows, chunks, kept, kept_pages, first_tokens)

    def run(self, plan: GroupPlan, layer: int, x: DeltaInputs, appended: Appended | None = None) -> Tensor:
        own: StatePlan = plan.own
        entries, shape = self._entries[:, layer], self._shape
        if own.begins is not None:
            self._note(own.begins, layer, x)
        held = entries.index_select(0, own.pages).masked_fill_(own.is_new, 0)
        tails, states = self._parts(held)
        output = x.log_decay.new_empty((x.mixed.shape[0], shape.value_heads, shape.value_dim))
        if own.rows.shape[0]:
            of_rows = DeltaInputs(x.mixed[own.rows], x.conv, x.log_decay[own.rows], x.beta[own.rows])
            output[own.rows] = self._step(of_rows, tails, states, own.singles)
        for index, begin, end, page in own.chunks:
            of_one = DeltaInputs(x.mixed[begin:end], x.conv, x.log_decay[begin:end], x.beta[begin:end])
            output[begin:end] = self._advance(of_one, tails[index], states[index])
            if page is not None:
                entries[page] = held[index]
        entries.index_copy_(0, own.pages, held)
        if own.kept.shape[0]:
            entries.index_copy_(0, own.kept_pages, held[own.kept])
        if appended is not None:
            appended(None, None)
        return output.to(x.mixed.dtype)

    @torch.inference_mode()
    def compute_again(self, sequence: int, count: int, source: int, target: int) -> None:
        """See PageOperations."""
        assert self._drafted is not None, "a forward with drafts comes first"
        begin = int(self._drafted.begins[sequence])
        for layer, x in self._drafted.inputs.items():
            held = self._entries[source : source + 1, layer].clone()
            tails, states = self._parts(held)
            new = slice(begin, begin + count)
            self._advance(DeltaInputs(x.mixed[new], x.conv, x.log_decay[new], x.beta[new]), tails[0], states[0])
            self._entries[target, layer] = held[0]

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """Whole entries [n, 1, numbers], twice."""
        entries = self._entries[:, layer].index_select(0, torch.from_numpy(slots.astype(np.int64))).unsqueeze(1)
        return entries, entries

    def _note(self, begins: Int64Array, layer: int, x: DeltaInputs) -> None:
        if self._drafted is None or self._drafted.begins is not begins:
            self._drafted = Drafted(begins, {})
        self._drafted.inputs[layer] = x

    def _parts(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Tails [n, tail, channels] and states [n, value_heads, key_dim, value_dim] of entries [n, numbers]."""
        shape = self._shape
        tails = held[:, : shape.tail * shape.channels].unflatten(1, (shape.tail, shape.channels))
        states = held[:, shape.tail * shape.channels :]
        return tails, states.unflatten(1, (shape.value_heads, shape.key_dim, shape.value_dim))

    def _step(self, x: DeltaInputs, tails: Tensor, states: Tensor, which: Tensor) -> Tensor:
        """o of the new token of each of the sequences `which`, whose tails and states change in place."""
        mixed, new_tails = step_conv(x.mixed, tails[which].to(x.mixed.dtype), x.conv)
        output, new_states = step_delta_rule(*self._heads(mixed), x.log_decay, x.beta.float(), states[which])
        tails[which], states[which] = new_tails.float(), new_states
        return output

    def _advance(self, x: DeltaInputs, tail: Tensor, state: Tensor) -> Tensor:
        """o of the new tokens of one sequence, whose tail and state change in place."""
        mixed, new_tail = chunk_conv(x.mixed, tail.to(x.mixed.dtype), x.conv)
        output, new_state = chunk_delta_rule(*self._heads(mixed), x.log_decay, x.beta.float(), state)
        tail.copy_(new_tail)
        state.copy_(new_state)
        return output

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [n, value_heads, key_dim] and v [n, value_heads, value_dim], float32."""
        shape = self._shape
        keys = shape.key_heads * shape.key_dim
        q, k, v = mixed.split_with_sizes((keys, keys, shape.value_heads * shape.value_dim), 1)
        served = shape.value_heads // shape.key_heads
        q, k = (unit(x.unflatten(1, (shape.key_heads, -1))).repeat_interleave(served, 1) for x in (q, k))
        return q * shape.key_dim**-0.5, k, v.float().unflatten(1, (shape.value_heads, -1))
