"""The forward face of a cache: what a forward needs, from its batch to what it sent."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tandem.cache.attention.begun_forward import Forward
from tandem.cache.attention.compressed import CompressedForward
from tandem.cache.attention.compressed_tokens import TokenForward, takes_by_token
from tandem.cache.attention.forward import NO_ATTENTION, Attention, Batch
from tandem.cache.attention.graph_buffers import GraphBuffers, make_graph_buffers
from tandem.cache.kernels.base import NO_PLAN, Limits
from tandem.cache.operations.parts import Ids, Parts
from tandem.cache.operations.send_plan import plan_sends
from tandem.cache.pages.sequence_table import ids_of
from tandem.cache.plan.arrays import Int64Array, integers
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.tables import StateWrites, TokenLayout


class ForwardCalls(Parts):
    """begin → compute all layers, or replay the graph that was captured for the buffers → commit."""

    def begin(self, batch: Batch, buffers: GraphBuffers | None = None, inputs: Sequence[Int64Array] = ()) -> Forward:
        """Grows the batch's sequences and plans the forward that computes the new positions.

        buffers: are filled with the forward; it pushes nothing, takes no token trees, and sequences that slide only
        where limits.sliding. Buffers of a verify step take several new positions of a sequence, as rows of their own.
        Buffers of a chain take the last of several. inputs: first elements of the buffers' inputs, int64. Positions
        that the previous forward sees of a decode step's sequences stay, because it may still run.
        """
        sequences, given = ids_of(batch.seq_ids), batch.append_lengths
        if batch.encodes:
            return self._begin_encoder(sequences, push=batch.push)
        appends = self._growth.one_each(len(sequences)) if given is None else integers("append_lengths", given)
        if buffers is not None:
            return self._begin_in_buffers(sequences, appends, batch, buffers, inputs)
        lengths = None if batch.rope_lengths is None else integers("rope_lengths", batch.rope_lengths)
        if lengths is not None and lengths.shape != (len(sequences),):
            raise InvalidArgument(f"rope_lengths has shape {lengths.shape}; it must be [B], B = {len(sequences)}")
        self._check_states(sequences, appends, batch)
        rows, tokens = self._growth.grow(sequences, appends, batch.token_tree_parents, in_flight=batch.scratch)
        sends, sent = plan_sends(self._marks, self._table, rows, tokens, push=batch.push)
        rotations, sliding = self._sliding.plan(rows, tokens, lengths)
        kept = self._pages.keep_states(rows, tokens, drafted=batch.drafted, without=batch.without_states)
        arrivals = self._fences.before(rows, tokens, kept, by_layers=True)
        plans = tuple(
            group.plan(rows, tokens, rotation, to_send, slides, writes, drafted=batch.drafted)
            for group, rotation, to_send, slides, writes in zip(
                self._groups, rotations, sends, sliding, kept, strict=True
            )
        )
        if arrivals is not None:
            plans = tuple(plan._replace(pushes_late=True) for plan in plans)
        standing = self._table.standing(rows)
        compressed = by_token = None
        if takes_by_token(self._groups, tokens):
            by_token = TokenForward.of_forward(self._groups, plans, tokens, self._rotations.at)
        elif self._layers.compressed:
            compressed = CompressedForward(self._groups, plans, self._rotations.at)
        locate = partial(self._sliding.locate, rows, tokens)
        attention = Attention(
            self._groups,
            plans,
            self._layers,
            standing,
            locate,
            compressed=compressed,
            by_token=by_token,
            arrivals=arrivals,
        )
        return Forward(sequences, tokens, attention, sent, standing)

    def _begin_in_buffers(
        self,
        sequences: tuple[int, ...],
        appends: Int64Array,
        batch: Batch,
        buffers: GraphBuffers,
        inputs: Sequence[Int64Array],
    ) -> Forward:
        limits = buffers.limits
        self._check_buffers(limits, sequences, appends, batch, inputs)
        self._check_states(sequences, appends, batch)
        rows, tokens = self._growth.grow(sequences, appends, in_flight=batch.scratch + limits.one_each)
        kept: tuple[StateWrites, ...] = ()
        if self.layout.recurs:
            kept = self._pages.keep_states(rows, tokens, drafted=batch.drafted, without=batch.without_states)
        self._fences.before(rows, tokens, kept, by_layers=False)
        if limits.runs:
            kept = tuple(writes.apart(tokens) for writes in kept)
            self._prepare(buffers, rows[tokens.owners], tokens.apart(), inputs, kept)
        elif limits.in_chain:
            self._prepare(buffers, rows, tokens.lasts(), inputs)
        else:
            self._prepare(buffers, rows, tokens, inputs, kept)
        buffers.send()
        standing = None if limits.one_each else self._table.standing(rows)
        return Forward(sequences, tokens, NO_ATTENTION, None, standing, buffers)

    def _check_states(self, sequences: tuple[int, ...], appends: Int64Array, batch: Batch) -> None:
        if self.layout.recurs and not batch.without_states:
            self._pages.check_states(sequences, self._table.rows(sequences), appends, drafted=batch.drafted)

    def _begin_encoder(self, sequences: tuple[int, ...], *, push: bool) -> Forward:
        if not self.layout.has_encoder:
            raise InvalidArgument("the layout has no encoder; only sequences of one that has are encoded")
        rows, tokens = self._growth.encode(sequences)
        self._fences.before(rows, tokens, by_layers=False)
        sends, sent = plan_sends(self._marks, self._table, rows, tokens, push=push)
        plans = tuple(
            group.plan(rows, tokens, None, to_send, None, encodes=True) if group.given else NO_PLAN
            for group, to_send in zip(self._groups, sends, strict=True)
        )
        standing = self._table.standing(rows)
        attention = Attention(self._groups, plans, self._layers, standing, encodes=True)
        return Forward(sequences, tokens, attention, sent, standing)

    def commit(self, forward: Forward, layers: range | None = None) -> None:
        """Commits a forward whose layers were all launched: its sends count as issued.

        layers: the layers of a forward whose positions are scratch and will be popped; None: all. A forward of some
        layers sends nothing. InvalidArgument, and nothing counts, when one of them never ran.
        """
        self._check_owner(forward)
        if forward.buffers is None:
            forward.attention.check_complete(layers)
        elif forward.is_next is not None:
            self._growth.grow(forward.seq_ids, self._growth.one_each(len(forward.seq_ids)), in_flight=1)
        self._marks.commit(forward.sent)
        self._launched = forward.standing if layers is None else None

    def commit_token_tree(self, seq_ids: Ids, leaf_indices: Ids) -> None:
        """Ends the open tree of each sequence: the path to node leaf_indices[i] becomes its next positions, and all
        other nodes are taken back; -1 takes back all.

        InvalidArgument, before anything changes, for a sequence without an open tree or a node that is not there.
        """
        self._trees.commit(ids_of(seq_ids), leaf_indices)

    # Graph buffers

    def graph_buffers(self, limits: Sequence[Limits]) -> list[GraphBuffers]:
        """Makes GraphBuffers for CUDA graphs, for each limit that the backends and RoPE support. All limits are of
        decode steps, or all of prompts. The buffers share memory: each is filled and replayed before the next."""
        return make_graph_buffers(limits, self._groups, self._rotations, self._layers, self._table)

    def foresee(self, buffers: GraphBuffers, seq_ids: Ids, inputs: Sequence[Int64Array]) -> Forward | None:
        """Fills `buffers` with the first step of sequences that are being received; None where that step is not known.

        Once their tokens are known, and where forward.is_next() says so, buffers.send() brings these to the device. No
        other buffers may have been filled since. commit() grows the sequences.
        """
        sequences = ids_of(seq_ids)
        tokens = self._growth.foresee(sequences)
        rows = self._table.rows(sequences)
        slides = self._table.sliding.count > 0 and bool(self._table.sliding.windows[rows].any())
        if tokens is None or self.layout.drops_past or buffers.limits.sharing or slides:
            return None
        if self.layout.recurs and not (tokens.seq_lens % self.layout.page_size).all():
            return None  # the step leaves a snapshot, which gets its page with the step itself
        self._prepare(buffers, rows, tokens, inputs)
        is_next = partial(self._growth.is_foreseen, rows)
        return Forward(sequences, tokens, NO_ATTENTION, None, None, buffers, is_next)

    def _prepare(
        self,
        buffers: GraphBuffers,
        rows: Int64Array,
        tokens: TokenLayout,
        inputs: Sequence[Int64Array],
        kept: Sequence[StateWrites] = (),
    ) -> None:
        """kept: of each layer group the snapshots that the forward leaves; none where it is empty."""
        sharing = buffers.limits.sharing
        look_ups = [group.look_up_apart if sharing else group.look_up for group in self._groups]
        parts = [group.split(rows, tokens) for group in self._groups]
        tables = [look_up(*part) for look_up, part in zip(look_ups, parts, strict=True)]
        tables = [replace(one, writes=writes) for one, writes in zip(tables, kept, strict=True)] if kept else tables
        ways = self._sliding.rows(rows) if buffers.limits.sliding else None
        buffers.prepare([layout for _, layout in parts], tables, inputs, ways)

    def _check_owner(self, forward: Forward) -> None:
        if forward.standing is not None and forward.standing.table is not self._table:
            raise InvalidArgument("the forward is of another cache; begin() of this one makes its own")

    def _check_buffers(
        self,
        limits: Limits,
        sequences: tuple[int, ...],
        appends: Int64Array,
        batch: Batch,
        inputs: Sequence[Int64Array],
    ) -> None:
        count = total = len(sequences)
        if batch.append_lengths is not None and not limits.in_chain:
            total = int(appends.sum())
        room = limits.num_sequences, limits.num_tokens
        if count > room[0] or total > room[1] or (limits.one_each and not limits.runs and count != total):
            raise InvalidArgument(f"the batch has {count} sequences and {total} tokens; the buffers are {limits}")
        shapes = [array.shape for array in inputs]
        if limits.one_each:
            fit = shapes == [(total,)] * len(limits.inputs)
        else:
            fit = shapes[:1] == [(total,)] and len(shapes) == 2 and inputs[1].size <= limits.num_sequences
        if not fit:
            raise InvalidArgument(f"inputs has shapes {shapes} for {count} sequences and {total} tokens")
        rows = self._table.rows(sequences)
        if batch.token_tree_parents is not None:
            raise InvalidArgument("token_tree_parents is given; graph buffers take no token trees")
        if batch.push and self._marks.any_open(rows):
            raise InvalidArgument("seq_ids has a sequence that is being sent; graph buffers push nothing")
        if not limits.sliding and self._table.sliding.count and self._table.sliding.windows[rows].any():
            raise InvalidArgument("seq_ids has a sequence that slides; graph buffers with limits.sliding take it")
