"""One worker's paged KV cache: sequences, the plan of each forward, attention, and both ends of a transfer."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.cache.construction import check_construction
from tandem.cache.errors import CacheError, InvalidArgument
from tandem.cache.fixed_batch import FixedBatch
from tandem.cache.kernels.base import GraphKernels, Kernels, PushingKernels
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.kernels.staging import Staging
from tandem.cache.layout import KVLayout
from tandem.cache.page_pools import PageIds, PagePools
from tandem.cache.page_writer import PageWriter
from tandem.cache.plan import (
    ForwardPlan,
    GroupPlan,
    Int64Array,
    PageTables,
    Send,
    TokenLayout,
    lay_out_tokens,
    look_up_pages,
    runs_of,
    slots_of,
)
from tandem.cache.position_map import PositionMap
from tandem.cache.rope import RopeParameters, RotaryEmbedding, Rotation
from tandem.cache.send_marks import SendMarks
from tandem.cache.sequence_pages import SequencePages
from tandem.cache.sequence_table import SequenceTable


class PagedKVCache:
    """Semantics as in Apache TVM's PagedAttentionKVCache. Owned by one thread, which makes every call.

    Each forward: begin_forward → attention for every layer → end_forward. Sequences share pages with each other and
    with the prefix index; none notices what another does with its own.

    Calls raise InvalidArgument for an unknown sequence or a value out of range, OutOfPages when the pool and what can
    be evicted from the prefix index do not suffice; either leaves everything as it was.
    """

    def __init__(
        self,
        layout: KVLayout,
        pools: Sequence[Tensor],
        *,
        max_sequences: int,
        max_sequence_length: int,
        rope: RopeParameters,
        writer: PageWriter | None,
        scale: float | None = None,
        kernels: Callable[[Tensor, float], Kernels] = choose_kernels,
    ) -> None:
        """pools: per layer group `[num_pages, *layout.page_shape(group)]`, contiguous, the caller's; what they hold at
        first does not matter. scale: of the softmax; None is head_dim ** -0.5. writer: None when nothing is sent.
        """
        check_construction(layout, pools, rope, max_sequence_length)
        self.layout = layout
        self._device = pools[0].device
        self._page_size = layout.page_size
        self._max_length = max_sequence_length
        self._writer = writer
        self._pools = PagePools(tuple(pool.shape[0] for pool in pools), layout.page_size)
        self._table = SequenceTable(len(pools), max_sequences, -(-max_sequence_length // layout.page_size))
        self._marks = SendMarks()
        self._incoming: dict[int, PageIds] = {}  # what a remote writer may still write, by sequence
        self._kernels = tuple(
            kernels(pool, group.head_dim**-0.5 if scale is None else scale)
            for pool, group in zip(pools, layout.groups, strict=True)
        )
        self._pages = SequencePages(self._table, self._pools, self._kernels, layout.page_size)
        self._places = {
            layer: (group, index)
            for group, members in enumerate(layout.groups)
            for index, layer in enumerate(members.layers)
        }
        self._rope_by_length = rope.rope_type == "dynamic"
        self._rotary = (
            None
            if rope.rope_type == "none"
            else RotaryEmbedding(rope, max_sequence_length, pools[0].device, layout.dtype)
        )

    # Sequences

    def add_sequence(self, sequence: int) -> None:
        """An empty sequence. OutOfSequences when max_sequences are there; an id that still drains is refused."""
        if sequence in self._incoming:
            raise InvalidArgument(f"sequence {sequence} still drains; finish_receive ends that")
        self._table.add(sequence)

    def remove_sequence(self, sequence: int) -> None:
        """Lets go of pages, mark and reservation; what is being received drains until finish_receive. Idempotent."""
        if sequence not in self._table:
            return
        self._pools.release(self._table.held_pages(self._table.row(sequence)))
        self._table.remove(sequence)
        self._marks.drop(sequence)

    def fork_sequence(self, parent: int, child: int, position: int = -1) -> None:
        """A new sequence with the first `position` positions of `parent` (-1: all): shares full pages, copies a
        partial one."""
        row = self._settled_row(parent)
        length = int(self._table.lengths[row])
        if not -1 <= position <= length:
            raise InvalidArgument(f"position is {position}; -1 and 0 … {length} are accepted")
        self.add_sequence(child)
        try:
            self._pages.fork(row, self._table.row(child), length if position == -1 else position)
        except CacheError:
            self._table.remove(child)
            raise

    def pop(self, sequence: int, count: int) -> None:
        """Takes back the last `count` positions; pages of a reservation stay. Those popped may be appended anew."""
        row = self._settled_row(sequence)
        length = int(self._table.lengths[row]) - count
        if count < 0 or length < 0:
            raise InvalidArgument(f"count is {count}; 0 … {length + count} are accepted")
        self._pages.cut(row, length)
        self._marks.rewind(sequence, length)

    def reserve(self, sequence: int, num_tokens: int) -> None:
        """Sets pages aside, so that the sequence can always grow to num_tokens positions; takes the place of an
        earlier reservation."""
        row = self._table.row(sequence)
        self._check_length(sequence, num_tokens)
        pages = -(-num_tokens // self._page_size)
        self._pages.own(row, int(self._table.lengths[row]), pages)
        self._table.reserved_pages[row] = pages

    def clear(self) -> None:
        """Removes all sequences and prefixes; pages that drain go on doing so."""
        for sequence in self._table.sequences():
            self.remove_sequence(sequence)
        self.clear_prefixes()

    # Forward

    def begin_forward(
        self,
        seq_ids: Sequence[int] | Int64Array,
        append_lengths: Sequence[int] | Int64Array,
        rope_lengths: Sequence[int] | Int64Array | None = None,
    ) -> ForwardPlan:
        """Grows sequence seq_ids[i] by append_lengths[i] ≥ 1 positions and plans the forward that computes them.

        rope_lengths: dynamic RoPE rotates a token by the length of its sequence, as transformers does: that of the
        whole prompt where it comes in chunks. None, or where smaller: the length after this append.
        """
        rows, tokens, tables = self._grow(seq_ids, np.asarray(append_lengths, np.int64))
        sequences = tuple(seq_ids.tolist() if isinstance(seq_ids, np.ndarray) else seq_ids)
        sends, sent = self._marks.plan(sequences, rows, tokens, self._table.pages, self._page_size)
        return ForwardPlan(
            seq_ids=sequences,
            tokens=tokens,
            groups=tuple(
                self._plan_group(group, tokens, of_group, to_send)
                for group, (of_group, to_send) in enumerate(zip(tables, sends, strict=True))
            ),
            rotation=self._plan_rotation(tokens, rope_lengths),
            sent=sent,
        )

    def attention(self, plan: ForwardPlan, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """o [T, num_q_heads, head_dim]: rotates q and k, stores K and V here and with receivers, attends causally.

        q is [T, num_q_heads, head_dim], k and v are [T, num_kv_heads, head_dim], not rotated, left as they are.
        Call it once for each layer, in order, under torch.inference_mode.
        """
        group, index = self._places[layer]
        work, kernels = plan.groups[group], self._kernels[group]
        if k.shape[0] != plan.num_tokens:
            raise InvalidArgument(f"k has {k.shape[0]} tokens; the plan has {plan.num_tokens}")
        q, k = kernels.append(index, q, k, v, plan.rotation, work.kernel_plan)
        for send in work.sends:
            assert self._writer is not None  # mark_send saw to it
            if index == 0 and send.source_slots.size:
                self._writer.write_slots(send.target_pe, group, send.source_slots, send.target_slots)
            if send.token_indices.shape[0]:
                self._writer.write_tokens(send.target_pe, group, index, k, v, send.token_indices, send.token_slots)
        return kernels.attend(index, q, k, v, work.kernel_plan)

    def end_forward(self, plan: ForwardPlan) -> None:
        """All layers of the plan were computed: what it had to send counts as issued."""
        self._marks.commit(plan.sent)

    def fixed_batches(self, sizes: Sequence[int], num_q_heads: int, num_inputs: int) -> list[FixedBatch]:
        """Batches of decode steps for CUDA graphs, see FixedBatch; empty where the kernels or RoPE cannot do them.

        They share their device memory: one is filled and replayed before the next is filled.
        """
        kernels = [one for one in self._kernels if isinstance(one, GraphKernels)]
        if len(kernels) < len(self._kernels) or self._rope_by_length or not sizes:
            return []
        pages = self._table.pages[0].shape[1]
        staging = Staging(FixedBatch.num_bytes(max(sizes), len(kernels), num_inputs, pages), self._device)
        options = {"num_q_heads": num_q_heads, "num_inputs": num_inputs, "max_pages": pages}
        return [FixedBatch(size, kernels, self._rotary, **options, staging=staging) for size in sizes]

    def begin_fixed(self, batch: FixedBatch, seq_ids: Sequence[int] | Int64Array, inputs: Sequence[Int64Array]) -> None:
        """Grows each sequence by one position and fills `batch` with the step that computes it; see begin_forward."""
        if len(seq_ids) > batch.size:
            raise InvalidArgument(f"seq_ids has {len(seq_ids)} sequences; the batch has room for {batch.size}")
        if self._marks.any_open(seq_ids):
            raise InvalidArgument("seq_ids has a sequence that is being sent; a fixed batch sends nothing")
        _, tokens, tables = self._grow(seq_ids, np.ones(len(seq_ids), np.int64))
        batch.fill(tokens, tables, inputs)

    # Transfers

    def prepare_receive(self, sequence: int, length: int) -> PositionMap:
        """Grows a sequence by length ≥ 1 positions that a remote writer will fill; where each of them goes.

        Until finish_receive the pages stay out of use whatever happens to the sequence, and it may only be removed.
        """
        row = self._settled_row(sequence)
        begin = int(self._table.lengths[row])
        if length < 1:
            raise InvalidArgument(f"length is {length}; it must be at least 1")
        self._check_length(sequence, begin + length)
        self._pages.grow(np.array([row]), np.array([begin]), np.array([begin + length]))
        end = begin + length
        pages = self._table.held_pages(row, begin // self._page_size, -(-end // self._page_size))
        self._pools.hold(pages)
        self._incoming[sequence] = pages
        self._table.receiving[row] = True
        held = self._table.held_pages(row)
        return PositionMap(begin, tuple(runs_of(ids, begin, end, self._page_size) for ids in held))

    def finish_receive(self, sequence: int) -> None:
        """The writer is quiet: no write into the sequence's pages can come any more. Idempotent."""
        pages = self._incoming.pop(sequence, None)
        if pages is None:
            return
        self._pools.settle(pages)
        if sequence in self._table:
            self._table.receiving[self._table.row(sequence)] = False

    def mark_send(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> None:
        """Positions `begin` (where the map starts) … end of the map go to target_pe while they are computed.

        Cached ones go page to page in the next forward, which must have one more to compute than they are.
        """
        length = self.num_tokens(sequence)
        if self._writer is None:
            raise InvalidArgument(f"sequence {sequence} cannot be sent: the cache was made without a writer")
        if begin != position_map.start_position:
            raise InvalidArgument(f"begin is {begin}; the position map starts at {position_map.start_position}")
        if len(position_map.runs) != len(self.layout.groups):
            raise InvalidArgument(
                f"the position map has {len(position_map.runs)} layer groups; the layout has {len(self.layout.groups)}"
            )
        if position_map.end_position <= length:
            raise InvalidArgument(
                f"the position map ends at {position_map.end_position}; it must reach further than the {length} "
                f"positions of sequence {sequence} that are cached"
            )
        self._marks.add(sequence, begin, position_map, target_pe)

    def num_sent(self, sequence: int) -> int:
        """Positions of its map that forwards have issued; less again after pop."""
        return self._marks.num_sent(sequence)

    def sends_done(self, sequence: int) -> bool:
        """Whether all of its map has been issued; True without one."""
        return self._marks.is_done(sequence)

    # Prefixes

    def match_prefix(self, sequence: int, token_ids: Sequence[int]) -> int:
        """Gives an empty sequence the longest indexed prefix of token_ids in full pages; its length in tokens.

        At least one token is left over to be computed.
        """
        row = self._table.row(sequence)
        if self._table.num_pages[row]:
            raise InvalidArgument(f"sequence {sequence} holds pages; only an empty one can take a prefix")
        pages = self._pools.prefixes.match(token_ids, max(len(token_ids) - 1, 0) // self._page_size)
        self._pages.share(row, pages)
        return pages[0].size * self._page_size

    def publish_prefix(self, sequence: int, token_ids: Sequence[int]) -> None:
        """Lets others share the full pages of a sequence that begins with token_ids; its KV must have been computed."""
        row = self._settled_row(sequence)
        length = int(self._table.lengths[row])
        if len(token_ids) > length:
            raise InvalidArgument(f"token_ids has {len(token_ids)} tokens; sequence {sequence} holds {length}")
        pages = self._table.held_pages(row, 0, len(token_ids) // self._page_size)
        self._pools.prefixes.publish(token_ids, pages)

    def clear_prefixes(self) -> None:
        """Forgets all prefixes; pages that sequences use stay theirs."""
        self._pools.prefixes.clear()

    # Counters and contents

    def num_tokens(self, sequence: int) -> int:
        return int(self._table.lengths[self._table.row(sequence)])

    @property
    def is_empty(self) -> bool:
        """Whether there is no sequence; pages may still drain or hold prefixes."""
        return len(self._table) == 0

    @property
    def num_pages(self) -> int:
        return self._pools.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated: free ones, and those that only the prefix index uses."""
        return self._pools.num_free

    @property
    def num_cached_pages(self) -> int:
        """Pages in the prefix index, used by sequences or not."""
        return len(self._pools.prefixes)

    @property
    def num_draining_pages(self) -> int:
        """Pages that nobody uses but a remote writer may still hit."""
        return self._pools.num_draining

    def gather_kv(self, sequence: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer copies of (k, v), [end - begin, num_kv_heads, head_dim] each, as stored: K is rotated."""
        row, length = self._table.row(sequence), self.num_tokens(sequence)
        if not 0 <= begin <= end <= length:
            raise InvalidArgument(f"begin and end are {begin} and {end}; 0 ≤ begin ≤ end ≤ {length} is accepted")
        positions = np.arange(begin, end)
        slots = [slots_of(pages[row], positions, self._page_size) for pages in self._table.pages]
        places = [self._places[layer] for layer in range(self.layout.num_layers)]
        return [self._kernels[group].read_slots(index, slots[group]) for group, index in places]

    # Checks and parts of the plan

    def _grow(
        self, seq_ids: Sequence[int] | Int64Array, appends: Int64Array
    ) -> tuple[Int64Array, TokenLayout, list[PageTables]]:
        """The sequences' rows, and what look_up_pages says of each group once they have grown."""
        rows = self._table.rows(seq_ids)
        lengths = self._table.lengths[rows]
        self._check_appends(seq_ids, rows, lengths, appends)
        self._pages.grow(rows, lengths, lengths + appends)
        tokens = lay_out_tokens(lengths, appends)
        return rows, tokens, [look_up_pages(pages, rows, tokens, self._page_size) for pages in self._table.pages]

    def _plan_group(self, group: int, tokens: TokenLayout, tables: PageTables, sends: tuple[Send, ...]) -> GroupPlan:
        kernels = self._kernels[group]
        plan = kernels.plan(tokens, tables)
        if sends and isinstance(kernels, PushingKernels):
            assert self._writer is not None  # mark_send saw to it
            plan, sends = kernels.push_with_append(plan, sends, partial(self._writer.peer_pool, group=group))
        return GroupPlan(tables, sends, plan)

    def _plan_rotation(self, tokens: TokenLayout, rope_lengths: Sequence[int] | Int64Array | None) -> Rotation | None:
        if self._rotary is None:
            return None
        positions = torch.from_numpy(tokens.positions.astype(np.int64))
        if not self._rope_by_length:
            return self._rotary.rotation(positions)
        lengths = tokens.seq_lens.astype(np.int64)
        if rope_lengths is not None:
            lengths = np.maximum(lengths, np.asarray(rope_lengths, np.int64))
        return self._rotary.rotation(positions, torch.from_numpy(lengths[tokens.owners]))

    def _settled_row(self, sequence: int) -> int:
        row = self._table.row(sequence)
        if self._table.receiving[row]:
            raise InvalidArgument(f"sequence {sequence} is being received; finish_receive ends that")
        return row

    def _check_length(self, sequence: int, length: int) -> None:
        if not 0 <= length <= self._max_length:
            raise InvalidArgument(f"sequence {sequence} would have {length} positions; 0 … {self._max_length} fit")

    def _check_appends(
        self, seq_ids: Sequence[int] | Int64Array, rows: Int64Array, lengths: Int64Array, appends: Int64Array
    ) -> None:
        if rows.size == 0 or appends.shape != rows.shape:
            raise InvalidArgument(f"append_lengths has shape {appends.shape}; it must be [B], B = {rows.size} ≥ 1")
        if int(appends.min()) < 1:
            raise InvalidArgument(f"append_lengths has {int(appends.min())}; lengths must be at least 1")
        longest = int((lengths + appends).argmax())
        self._check_length(seq_ids[longest], int(lengths[longest] + appends[longest]))
        if self._incoming and self._table.receiving[rows].any():
            receiving = int(np.flatnonzero(self._table.receiving[rows])[0])
            raise InvalidArgument(f"sequence {seq_ids[receiving]} is being received; finish_receive ends that")
