"""Recurrent states in pages, with torch operations: the reference."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.cache.kernels.base import Appended, AttentionBackend, Capabilities, GroupPlan
from tandem.cache.kernels.recurrent import DeltaShape, KdaShape, RecurrentInputs, SsdShape, StateShape
from tandem.cache.kernels.torch import delta_rule, kda, ssd
from tandem.cache.kernels.torch.causal_conv import chunk_conv, step_conv
from tandem.cache.plan.arrays import Int32Array, Int64Array
from tandem.cache.plan.tables import PageTables, StateWrites, TokenLayout


class Rule(NamedTuple):
    """How tokens change a state and read it, as functions of its shape, the inputs after the convolution, and states
    in float32. They give o [n, heads, output_dim] in float32 and the states after the tokens.

    step: one token of each of n sequences, states [n, *shape.state]. advance: n tokens of one, state [*shape.state].
    """

    step: Callable[[Any, RecurrentInputs, Tensor], tuple[Tensor, Tensor]]
    advance: Callable[[Any, RecurrentInputs, Tensor], tuple[Tensor, Tensor]]


RULES: Mapping[type[StateShape], Rule] = MappingProxyType(
    {
        DeltaShape: Rule(delta_rule.step, delta_rule.advance),
        KdaShape: Rule(delta_rule.step, kda.advance),
        SsdShape: Rule(ssd.step, ssd.advance),
    }
)


class Chunk(NamedTuple):
    """Tokens begin … end - 1 of a forward, all of one sequence. page: of the snapshot after them; None: none."""

    sequence: int
    begin: int
    end: int
    page: int | None


class StatePlan(NamedTuple):
    """A forward of B sequences. pages: int64 [B]. is_new: bool [B, 1], whether a sequence has no tokens yet, so that
    its page means nothing. singles, rows: int64 [n], the sequences with one new token, and that token. chunks: the
    other sequences. kept: int64 [m], sequences whose states at the end of the forward are kept in kept_pages, int64
    [m]."""

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
    inputs: dict[int, RecurrentInputs]


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


class TorchStateKernels(AttentionBackend[RecurrentInputs]):
    """A page is the entry of one sequence, see StateShape.numbers, in float32."""

    capabilities = Capabilities(trees=False)

    def __init__(self, pool: Tensor, shape: StateShape) -> None:
        super().__init__(pool)
        self._shape, self._rule = shape, RULES[type(shape)]
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

    def run(self, plan: GroupPlan, layer: int, x: RecurrentInputs, appended: Appended | None = None) -> Tensor:
        own: StatePlan = plan.own
        entries, shape = self._entries[:, layer], self._shape
        if own.begins is not None:
            self._note(own.begins, layer, x)
        held = entries.index_select(0, own.pages).masked_fill_(own.is_new, 0)
        tails, states = self._parts(held)
        output = x.log_decay.new_empty((x.mixed.shape[0], shape.heads, shape.output_dim))
        if own.rows.shape[0]:
            output[own.rows] = self._step(x.of(own.rows), tails, states, own.singles)
        for index, begin, end, page in own.chunks:
            output[begin:end] = self._advance(x.of(slice(begin, end)), tails[index], states[index])
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
            self._advance(x.of(slice(begin, begin + count)), tails[0], states[0])
            self._entries[target, layer] = held[0]

    def read_slots(self, layer: int, slots: Int32Array) -> tuple[Tensor, Tensor]:
        """Whole entries [n, 1, numbers], twice."""
        entries = self._entries[:, layer].index_select(0, torch.from_numpy(slots.astype(np.int64))).unsqueeze(1)
        return entries, entries

    def _note(self, begins: Int64Array, layer: int, x: RecurrentInputs) -> None:
        if self._drafted is None or self._drafted.begins is not begins:
            self._drafted = Drafted(begins, {})
        self._drafted.inputs[layer] = x

    def _parts(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Tails [n, tail, channels] and states [n, *shape.state] of entries [n, numbers]."""
        shape = self._shape
        tails = held[:, : shape.tail * shape.channels].unflatten(1, (shape.tail, shape.channels))
        return tails, held[:, shape.tail * shape.channels :].unflatten(1, shape.state)

    def _step(self, x: RecurrentInputs, tails: Tensor, states: Tensor, which: Tensor) -> Tensor:
        """o of the new token of each of the sequences `which`, whose tails and states change in place."""
        mixed, new_tails = step_conv(x.mixed, tails[which].to(x.mixed.dtype), x.conv, x.conv_bias)
        output, new_states = self._rule.step(self._shape, x._replace(mixed=mixed), states[which])
        tails[which], states[which] = new_tails.float(), new_states
        return output

    def _advance(self, x: RecurrentInputs, tail: Tensor, state: Tensor) -> Tensor:
        """o of the new tokens of one sequence, whose tail and state change in place."""
        mixed, new_tail = chunk_conv(x.mixed, tail.to(x.mixed.dtype), x.conv, x.conv_bias)
        output, new_state = self._rule.advance(self._shape, x._replace(mixed=mixed), state)
        tail.copy_(new_tail)
        state.copy_(new_state)
        return output
