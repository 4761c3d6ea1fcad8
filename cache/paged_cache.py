"""One worker's paged KV cache: sequences, the plan of each forward, attention, and both ends of a transfer."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tandem.cache.attention.fixed_batch import FixedBatch
from tandem.cache.attention.fixed_prompts import FixedPrompts
from tandem.cache.attention.forward_plan import ForwardPlan
from tandem.cache.attention.group_attention import GroupAttention
from tandem.cache.attention.latent_attention import LatentGroupAttention
from tandem.cache.attention.layer_groups import Heads, make_groups, make_pages
from tandem.cache.attention.rotations import Rotations
from tandem.cache.attention.streams import Streams
from tandem.cache.kernels.base import KernelFactory
from tandem.cache.kernels.choice import choose_kernels
from tandem.cache.operations.fixed_forwards import FixedForwards
from tandem.cache.operations.growth import Growth
from tandem.cache.operations.open_trees import OpenTrees, Parents
from tandem.cache.operations.receptions import Receptions
from tandem.cache.operations.sequences import Sequences
from tandem.cache.operations.store import Store
from tandem.cache.operations.transmissions import Transmissions
from tandem.cache.pages.page_pools import PagePools
from tandem.cache.pages.send_marks import SendMarks
from tandem.cache.pages.sequence_table import SequenceTable, ids_of
from tandem.cache.plan.arrays import Int64Array, checked_reach, integer, integers
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.latent import LatentHeads, UpProjections
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.position_map import PositionMap
from tandem.cache.plan.rope import RopeParameters


class PagedKVCache:
    """Semantics as in Apache TVM's PagedAttentionKVCache. Owned by one thread, which makes every call.

    Each forward: begin_forward → attention for every layer → end_forward. Sequences share pages with each other and
    with the prefix index; none notices what another does with its own.

    A layer group with a window keeps of each sequence the pages that later queries can see. What is behind is let go of
    when the next forward is begun, so that forward comes, on the device, after the one before; it is out of reach for
    pop, fork_sequence and gather_kv. Layouts with windows share no prefixes.

    Calls raise InvalidArgument for an unknown sequence or a value that is not accepted, OutOfPages when the pool and
    what can be evicted from the prefix index do not suffice; either leaves everything as it was.
    """

    def __init__(
        self,
        layout: KVLayout,
        pools: Sequence[Tensor],
        *,
        max_sequences: int,
        max_sequence_length: int,
        rope: RopeParameters | Sequence[RopeParameters],
        writer: PageWriter | None,
        scale: float | None = None,
        softcap: float | None = None,
        latent: LatentHeads | None = None,
        kernels: KernelFactory = choose_kernels,
    ) -> None:
        """pools: per layer group `[num_pages, *layout.page_shape(group)]`, contiguous, the caller's; what they hold at
        first does not matter. rope: one for all groups, or one for each. writer: None when nothing is sent.

        scale: of the softmax; None is that of q's width, ** -0.5. softcap: scores become softcap · tanh(score /
        softcap), not with latents. latent: the heads that read those of groups with latents.
        """
        layout.check_pools(pools)
        integer("max_sequence_length", max_sequence_length, least=1)
        self.layout, self.max_sequence_length, self._places = layout, max_sequence_length, layout.places
        self._pools = PagePools(tuple(pool.shape[0] for pool in pools), layout.page_size)
        self._table = SequenceTable(len(pools), max_sequences, max_sequence_length, layout.page_size)
        self._marks = SendMarks(len(pools), max_sequences)
        self._rotations = Rotations(rope, layout, max_sequence_length, pools[0].device)
        self._streams = Streams(self._table, self._rotations, layout.page_size)
        self._groups = make_groups(layout, pools, self._table.groups, writer, Heads(scale, softcap, latent), kernels)
        self._pages = make_pages(layout, self._table, self._pools, self._groups)
        parts = self._pools, self._table, self._marks, self._streams, self._groups, self._pages
        store = Store(layout, max_sequence_length, *parts)
        self._receptions = Receptions(store, pools)
        self._trees = OpenTrees(store)
        self._growth = Growth(store, self._receptions, self._trees)
        self._transmissions = Transmissions(store, self._trees, writer)
        self._sequences = Sequences(store, self._receptions, self._trees, self._growth)
        self._fixed = FixedForwards(store, self._growth, self._rotations)

    # Sequences

    def add_sequence(self, sequence: int) -> None:
        """An empty sequence. OutOfSequences when max_sequences are there; an id that still drains is refused."""
        self._sequences.add(sequence)

    def remove_sequence(self, sequence: int) -> None:
        """Lets go of pages, mark and reservation; what is being received drains until finish_receive. Idempotent."""
        self._sequences.remove(sequence)

    def fork_sequence(self, parent: int, child: int, position: int = -1) -> None:
        """A new sequence with the first `position` positions of `parent` (-1: all): shares full pages, copies a
        partial one. With windows, what a query at `position` sees must be there yet."""
        self._sequences.fork(parent, child, position)

    def pop(self, sequence: int, count: int) -> None:
        """Takes back the last `count` positions; pages of a reservation stay. Those popped may be appended anew.

        With windows, what a query at the new length sees must be there yet; after a forward it is, as long as no more
        is popped than it appended.
        """
        self._sequences.pop(sequence, count)

    def reserve(self, sequence: int, num_tokens: int, longest_append: int | None = None) -> None:
        """Sets pages aside, so that the sequence can always grow to num_tokens positions; takes the place of an
        earlier reservation.

        longest_append: the most that one forward will append or a token tree hold (None: num_tokens), by which groups
        with a window need less; what prepare_receive adds may be longer.
        """
        self._sequences.reserve(sequence, num_tokens, longest_append)

    def enable_sliding_window(self, sequence: int, window: int, sink: int) -> None:
        """From now on an empty sequence keeps, after what a forward appends, its first `sink` positions and the last
        window - sink (more while a forward appends more), and may grow for ever (StreamingLLM).

        K is stored before RoPE and rotated by its place among what is kept. The sequence can be forked within its sink,
        and the child slides as it does; pop takes back what is kept. Whoever receives it must slide alike.
        """
        self._sequences.enable_sliding_window(sequence, window, sink)

    def num_pages_needed(self, num_tokens: int, longest_append: int | None = None) -> tuple[int, ...]:
        """Per layer group the pages that reserve() takes for a sequence that is empty."""
        return self._pages.needed(*checked_reach(num_tokens, longest_append))

    def has_room(self, num_tokens: int, longest_append: int | None = None) -> bool:
        """Whether add_sequence() and reserve() would work for one more sequence now."""
        needed = self.num_pages_needed(num_tokens, longest_append)
        return self._table.has_vacancy and all(
            pages <= free for pages, free in zip(needed, self._pools.num_free, strict=True)
        )

    def shortage(self, num_tokens: int, longest_append: int | None = None) -> tuple[int, int] | None:
        """Pages that reserve() would take of a layer group that has fewer in all, and how many it has; or None."""
        needed = self.num_pages_needed(num_tokens, longest_append)
        short = (pair for pair in zip(needed, self._pools.num_pages, strict=True) if pair[0] > pair[1])
        return next(short, None)

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
        token_tree_parents: Sequence[Parents | None] | None = None,
        *,
        push: bool = True,
    ) -> ForwardPlan:
        """Grows sequence seq_ids[i] by append_lengths[i] ≥ 1 positions and plans the forward that computes them.

        push: whether it sends what is marked; if not, send_cached() or a later forward does.

        rope_lengths: dynamic RoPE rotates a token by the length of its sequence, as transformers does: that of the
        whole prompt where it comes in chunks. None, or where smaller: the length after this append.

        token_tree_parents: None, or an entry for each sequence. None for a plain one; else, for each new position, the
        node that it follows in the sequence's token tree, or -1 for a root. Nodes count over the whole open tree, which
        later calls may grow; parents come before their children, and at most 256 fit. Until commit_token_tree the
        sequence takes no plain forward; it is not forked, published, sent or received into. pop takes back the last
        nodes. Sequences that slide or are being sent take no trees. A forward with trees runs eagerly: no FixedBatch,
        and so no CUDA graph, takes one.
        """
        sequences, appends = ids_of(seq_ids), integers("append_lengths", append_lengths)
        lengths = None if rope_lengths is None else integers("rope_lengths", rope_lengths)
        if lengths is not None and lengths.shape != (len(sequences),):
            raise InvalidArgument(f"rope_lengths has shape {lengths.shape}; it must be [B], B = {len(sequences)}")
        rows, tokens = self._growth.grow(sequences, appends, token_tree_parents)
        sends, sent = self._transmissions.plan(rows, tokens) if push else self._transmissions.nothing
        rotations, streams = self._streams.plan(rows, tokens, lengths)
        groups = tuple(
            group.plan(rows, tokens, rotation, to_send, sliding)
            for group, rotation, to_send, sliding in zip(self._groups, rotations, sends, streams, strict=True)
        )
        return ForwardPlan(sequences, tokens, groups, sent, self._table.standing(rows))

    def attention(
        self, plan: ForwardPlan, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """o [T, num_q_heads, head_dim]: rotates q and k, stores K and V here and with receivers, attends causally.

        q is [T, num_q_heads, head_dim], k and v are [T, num_kv_heads, head_dim], not rotated, left as they are; any
        strides, but 1 in the last dimension.
        sinks: [num_q_heads], learned logits that take their share of each softmax and give nothing (gpt_oss).
        Call it once for each layer, in order, under torch.inference_mode, before a sequence of the plan is shortened or
        removed.
        """
        group, index = self._place(plan, layer)
        of_group = self._groups[group]
        if not isinstance(of_group, GroupAttention):
            raise InvalidArgument(f"layer is {layer}, which keeps latents; latent_attention serves it")
        return of_group.attend(plan.groups[group], index, q, k, v, sinks)

    def latent_attention(
        self, plan: ForwardPlan, layer: int, q: Tensor, latents: Tensor, keys: Tensor, up: UpProjections
    ) -> Tensor:
        """As attention, of a layer that keeps latents, see tandem.cache.plan.latent: o [T, num_heads, value_dim].

        q [T, num_heads, key_dim + rotated] and keys [T, rotated] are not rotated yet; with latents [T, latent_rank]
        they may be overwritten. Chooses for each sequence whether to absorb `up` or to expand what is stored.
        """
        group, index = self._place(plan, layer)
        of_group = self._groups[group]
        if not isinstance(of_group, LatentGroupAttention):
            raise InvalidArgument(f"layer is {layer}, which keeps no latents; attention serves it")
        return of_group.attend(plan.groups[group], index, q, latents, keys, up)

    def end_forward(self, plan: ForwardPlan) -> None:
        """All layers of the plan were computed: what it had to send counts as issued."""
        self._transmissions.end(plan)

    def commit_token_tree(self, seq_ids: Sequence[int] | Int64Array, leaf_indices: Sequence[int] | Int64Array) -> None:
        """Ends the open tree of each sequence: the path to node leaf_indices[i] becomes its next positions, and all
        other nodes are taken back; -1 takes back all.

        InvalidArgument, before anything changes, for a sequence without an open tree or a node that is not there.
        """
        self._trees.commit(ids_of(seq_ids), leaf_indices)

    def fixed_batches(
        self, sizes: Sequence[int], num_q_heads: int, num_inputs: int, *, sharing: bool = False
    ) -> list[FixedBatch]:
        """Batches of decode steps for CUDA graphs, see FixedBatch; none where kernels or RoPE cannot do them. They
        share memory: one is filled and replayed before the next is. sharing: for steps of which pays_to_share()."""
        return self._fixed.batches(sizes, num_q_heads, num_inputs, sharing)

    def fixed_prompts(self, sizes: Sequence[int], num_sequences: int, num_q_heads: int) -> list[FixedPrompts]:
        """As fixed_batches, forwards of prompts, see FixedPrompts: of those `sizes`, tokens, that kernels can do."""
        return self._fixed.prompts(sizes, num_sequences, num_q_heads)

    def pays_to_share(self, batch: FixedBatch, seq_ids: Sequence[int] | Int64Array) -> bool:
        """Whether the next step of these sequences is faster in `batch`, a sharing one, than in another."""
        return self._fixed.pays_to_share(batch, ids_of(seq_ids))

    def begin_fixed(self, batch: FixedBatch, seq_ids: Sequence[int] | Int64Array, inputs: Sequence[Int64Array]) -> None:
        """Grows each sequence by one position and fills `batch` with the step that computes it; see begin_forward. The
        step before may still run: pages that it sees stay."""
        self._fixed.begin_step(batch, ids_of(seq_ids), inputs)

    def begin_prompts(
        self,
        prompts: FixedPrompts,
        seq_ids: Sequence[int] | Int64Array,
        append_lengths: Sequence[int] | Int64Array,
        token_ids: Int64Array,
        last_rows: Int64Array,
    ) -> None:
        """Grows sequences as begin_forward does, and fills `prompts` with the forward that computes token_ids (int64
        [T]), of which last_rows (int64 [n]) are to have logits. What is marked to be sent is left to send_cached()."""
        standing = self._fixed.begin_prompts(prompts, ids_of(seq_ids), append_lengths, token_ids, last_rows)
        self._transmissions.launched(standing)

    def foresee(self, batch: FixedBatch, seq_ids: Sequence[int], inputs: Sequence[Int64Array]) -> bool:
        """Fills `batch` with the first step of sequences that are being received; False where that is not known."""
        return self._fixed.foresee(batch, ids_of(seq_ids), inputs)

    def step_foreseen(
        self, batch: FixedBatch, seq_ids: Sequence[int], inputs: Sequence[Int64Array], replay: Callable[[], Tensor]
    ) -> Tensor | None:
        """begin_fixed() of what foresee() filled in, with these first inputs, and a replay before sequences grow; None,
        and nothing happens, unless it is their next step. No batch may have been filled since."""
        return self._fixed.step_foreseen(batch, ids_of(seq_ids), inputs, replay)

    # Transfers

    def prepare_receive(self, sequence: int, length: int) -> PositionMap:
        """Grows a sequence by length ≥ 1 positions that a remote writer will fill; where each of them goes.

        Positions in pages that no later query sees, by the groups' windows, are skipped. Until finish_receive the pages
        stay out of use whatever happens to the sequence, and it may only be removed.
        """
        row = self._sequences.settled_row(sequence)
        integer("length", length, least=1)
        if self.layout.has_windows and self._marks.any_open(row):  # what it is to send may leave a window
            raise InvalidArgument(f"sequence {sequence} is marked to be sent; with windows it receives only afterwards")
        if self._table.streams.windows[row] == 0:  # a stream has room for any number
            self._growth.check_length(sequence, int(self._table.lengths[row]) + length)
        return self._receptions.begin(sequence, length)

    def finish_receive(self, sequence: int) -> None:
        """The writer is quiet: no write into the sequence's pages can come any more. Idempotent."""
        self._receptions.finish(sequence)

    def mark_send(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> None:
        """Positions `begin` (where the map starts) … end of the map go to target_pe while they are computed, cached
        ones page to page with the next forward or send_cached(). InvalidArgument when the map asks for some that have
        left a window here; a forward that would let go of some not yet sent is refused."""
        self._transmissions.mark(sequence, begin, position_map, target_pe)

    def send_cached(self, sequence: int) -> None:
        """What a marked sequence has and did not send goes page to page, once what was launched so far stored it."""
        self._receptions.check_settled(sequence)
        self._transmissions.send_cached(sequence)

    def num_sent(self, sequence: int) -> int:
        """Positions of its map that forwards have issued; less again after pop."""
        return self._marks.num_sent(self._table.row(sequence))

    def bytes_sent(self, sequence: int) -> int:
        """Bytes of those, without what the map skips."""
        return self._transmissions.bytes_sent(sequence)

    def sends_done(self, sequence: int) -> bool:
        """Whether all of its map has been issued; True without one."""
        return not self._marks.any_open(self._table.row(sequence))

    # Prefixes

    def match_prefix(self, sequence: int, token_ids: Sequence[int] | Int64Array) -> int:
        """Gives an empty sequence the longest indexed prefix of token_ids in full pages; its length in tokens.

        At least one token is left over to be computed.
        """
        return self._sequences.match_prefix(sequence, token_ids)

    def publish_prefix(self, sequence: int, token_ids: Sequence[int] | Int64Array) -> None:
        """Lets others share the full pages of a sequence that begins with token_ids; its KV must have been computed."""
        self._sequences.publish_prefix(sequence, token_ids)

    def clear_prefixes(self) -> None:
        """Forgets all prefixes; pages that sequences use stay theirs."""
        self._pools.prefixes.clear()

    # Counters and contents

    def num_tokens(self, sequence: int) -> int:
        """Positions appended; a sliding window has evicted some of them."""
        return self._table.num_positions(self._table.row(sequence))

    def first_position(self, sequence: int) -> int:
        """The first position that all layers hold: 0 without windows."""
        return self._pages.first_position(self._table.row(sequence))

    @property
    def is_empty(self) -> bool:
        """Whether there is no sequence; pages may still drain or hold prefixes."""
        return len(self._table) == 0

    @property
    def num_pages(self) -> int:
        """Pages of the smallest layer group."""
        return min(self._pools.num_pages)

    @property
    def num_free_pages(self) -> int:
        """Pages of the scarcest group that can be allocated: free ones, and those that only the prefix index uses."""
        return min(self._pools.num_free)

    @property
    def num_cached_pages(self) -> int:
        """Pages in the prefix index, used by sequences or not."""
        return len(self._pools.prefixes)

    @property
    def num_draining_pages(self) -> int:
        """Pages that nobody uses but a remote writer may still hit."""
        return max(self._pools.num_draining)

    def gather_kv(self, sequence: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer copies of (k, v), [end - begin, num_kv_heads, head_dim] each, as stored: K rotated, FP8 widened.

        begin is at least first_position(sequence), unless nothing is asked for.
        """
        found = [self.gather_group(sequence, group, begin, end) for group in range(len(self._groups))]
        return [found[group][index] for group, index in self._places.values()]

    def gather_group(self, sequence: int, group: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """gather_kv() of one layer group's layers, for which `begin` may be as early as the group holds positions."""
        row, length = self._table.row(sequence), self.num_tokens(sequence)
        if not 0 <= integer("group", group) < len(self._groups):
            raise InvalidArgument(f"group is {group}; 0 … {len(self._groups) - 1} are accepted")
        if not 0 <= integer("begin", begin) <= integer("end", end) <= length:
            raise InvalidArgument(f"begin and end are {begin} and {end}; 0 ≤ begin ≤ end ≤ {length} is accepted")
        first = int(self._table.groups[group].begins[row]) * self.layout.page_size
        if begin < min(first, end):
            raise InvalidArgument(f"begin is {begin}; positions before {first} have left the window of group {group}")
        layers = range(len(self.layout.groups[group].layers))
        return self._groups[group].gather(layers, row, self._streams.indices(row, begin, end))

    def _place(self, plan: ForwardPlan, layer: int) -> tuple[int, int]:
        """The group of a layer, and its index there. InvalidArgument where the plan cannot be computed any more."""
        plan.standing.check(self._table)
        if layer not in self._places:
            raise InvalidArgument(f"layer is {layer}; 0 … {len(self._places) - 1} are accepted")
        return self._places[layer]
