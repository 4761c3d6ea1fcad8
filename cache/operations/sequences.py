"""The sequence face of a cache: sequences come, share pages with one another and the prefix index, shrink and go."""

from collections.abc import Callable, Sequence
from operator import mul

from torch import Tensor

from tandem.cache.operations.holdings import PageCounts, Room, SequenceState
from tandem.cache.operations.parts import Ids, Parts
from tandem.cache.operations.stored import with_store
from tandem.cache.pages.prefix_log import PrefixChanges
from tandem.cache.pages.sequence_table import ids_of
from tandem.cache.plan.arrays import Int32Array, Int64Array, checked_reach, integer, integers
from tandem.cache.plan.errors import CacheError, InvalidArgument, OutOfPages
from tandem.cache.plan.prefix_chain import encoder_salt
from tandem.cache.plan.spans import NO_WINDOW, Sliding
from tandem.cache.store.copies import NO_COPIES
from tandem.cache.store.page_store import PageStore


class SequenceCalls(Parts):
    """Sequences and the prefix index, and what there is of both."""

    def add_sequence(self, sequence: int, encoder_len: int = 0) -> None:
        """An empty sequence. OutOfSequences when max_sequences are there; an id that still drains is refused.

        encoder_len: of a layout with an encoder: how many positions that has of the sequence, at least 1. Padded to
        whole pages, they are the sequence's first: encode() or a remote writer stores them, all at once.
        """
        if integer("sequence", sequence) in self._receptions.incoming:
            raise InvalidArgument(f"sequence {sequence} still drains; finish_receive ends that")
        self._check_encoder_len(encoder_len)
        self._pages.open(self._table.add(sequence, encoder_len))

    def remove_sequence(self, sequence: int) -> tuple[Int32Array, ...]:
        """Lets go of pages, mark and reservation; what is being received drains until finish_receive. Idempotent.
        Returns the ids of the pages that it held, of each group."""
        if sequence not in self._table:
            return ()
        row = self._table.row(sequence)
        held = self._table.held_pages(row)
        self._pages.drop(row)
        self._marks.drop(row)
        self._trees.drop(sequence)
        self._table.remove(sequence)
        return held

    def fork_sequence(self, parent: int, child: int, position: int = -1, *, slides: bool = True) -> None:
        """A new sequence with the first `position` positions of `parent` (-1: all): shares full pages, copies a
        partial one. With windows, what a query at `position` sees must be there yet. slides: whether the child of a
        sequence that slides does so, too; if not, it grows as a plain one, and may be made to slide otherwise."""
        integer("position", position)
        row, sliding_table = self._settled_row(parent), self._table.sliding
        sliding, length = sliding_table.sliding(row), self._table.num_positions(row)
        evicts = sliding is not None and sliding.window != NO_WINDOW
        sink = sliding.sink if sliding is not None and evicts else length
        at, most = (length if position == -1 else position), min(sink, length)
        least = self._table.border(row)
        if not least <= at <= most:
            raise InvalidArgument(f"position is {position}; it must be -1 (all {length}) or from {least} to {most}")
        self.add_sequence(child, int(self._table.encoder_lens[row]))
        try:
            self._pages.fork(row, self._table.row(child), at)
            self._table.arriving[self._table.row(child)] = self._table.arriving[row]
            if sliding is not None:
                child_slides = sliding._replace(rotated=min(sliding.rotated, at))
                if evicts and not slides:
                    child_slides = Sliding(NO_WINDOW, 0, rotated=child_slides.rotated)
                if child_slides.window != NO_WINDOW or child_slides.rotated < at:
                    self._table.slide(self._table.row(child), child_slides)
        except CacheError:
            self._table.remove(child)
            raise

    def pop_each(self, seq_ids: Ids, counts: Ids) -> None:
        """Takes back the last counts[i] positions of each sequence seq_ids[i]; pages of a reservation stay. Those
        popped may be appended anew. Where one sequence raises, those before it are shorter.

        With windows, what a query at the new length sees must be there yet; after a forward it is, as long as no more
        is popped than it appended.
        """
        ids, taken = ids_of(seq_ids), integers("counts", counts)
        rows = self._table.rows(ids)
        if taken.shape != rows.shape:
            raise InvalidArgument(f"counts has shape {taken.shape}; it must be [B], B = {rows.size}")
        plain = self._table.sliding.count == 0 and self._marks.count == 0 and not self._trees.any_open
        if plain and not self._receptions.incoming and self._pages.cut_reserved(rows, taken):
            return  # in one go: all of them keep their pages
        for sequence, row, count in zip(ids, rows.tolist(), taken.tolist(), strict=True):
            self._pop(sequence, row, count)

    def _pop(self, sequence: int, row: int, count: int) -> None:
        self._receptions.check_settled(sequence)
        length = int(self._table.lengths[row]) - count
        if count < 0 or length < 0:
            raise InvalidArgument(f"counts has {count} for sequence {sequence}; it must be from 0 to {length + count}")
        self._sliding.check_cut(row, length)
        self._trees.pop(sequence, count)
        self._pages.cut(row, length)
        self._table.sliding.rotated[row] = min(self._table.sliding.rotated[row], self._table.num_positions(row))
        self._marks.rewind(row, self._table.num_positions(row))

    def reserve(self, sequence: int, num_tokens: int, longest_append: int | None = None) -> None:
        """Sets pages aside, so that the sequence can always grow to num_tokens positions; replaces an earlier
        reservation.

        longest_append: the most that one forward will append or a token tree hold (None: num_tokens), by which groups
        with a window need less; what prepare_receive adds may be longer.
        """
        num_tokens, longest = checked_reach(num_tokens, longest_append)
        row = self._table.row(sequence)
        if self._table.sliding.windows[row]:
            num_tokens = min(num_tokens, self._table.sliding.longest(row, longest))
        self._table.check_length(sequence, num_tokens)
        self._pages.reserve(row, num_tokens, longest)

    def enable_sliding_window(self, sequence: int, window: int, sink: int, *, evict_after: bool = False) -> None:
        """Makes a sequence keep its first `sink` positions and the last window - sink, so that it may grow for ever
        (StreamingLLM).

        What is in excess is evicted before a forward appends, so that with what that appends `window` are there (more
        while one appends more). evict_after: only what is in excess without that; a forward's tokens see `window`
        positions before them. What has left is out of reach once the next forward begins. Of what is kept, a group
        with a window or chunks shows and holds what it would of the whole text.

        K is stored before RoPE and rotated by its index among what is kept. What the sequence holds already stays as it
        is stored, also where others share it: a fork's prefix can be its sink. The sequence can be forked within its
        sink; pop takes back what is kept. It is received from one that slides alike, or see prepare_receive.
        """
        row, layout = self._settled_row(sequence), self.layout
        reasons = [group.kind.no_sliding for group in layout.groups]
        if refused := next(filter(None, reasons), None):
            raise InvalidArgument(f"the layout has groups with {refused}; sequences slide only in layouts without")
        had, length = self._table.sliding.sliding(row), self._table.num_positions(row)
        if had is not None and had.window != NO_WINDOW:
            raise InvalidArgument(f"sequence {sequence} slides already; its window is set once")
        if self._marks.any_open(row):  # the receiver of its position map would have to slide alike
            raise InvalidArgument(f"sequence {sequence} is marked to be sent; only one that is not can begin to slide")
        self._sliding.check_window(window, sink, self.max_sequence_length)
        rotated = length if had is None else had.rotated
        self._sliding.check_rotated(window, sink, rotated)
        self._table.slide(row, Sliding(window, sink, evict_after, rotated))

    def any_slides(self, seq_ids: Sequence[int] | Int64Array | None = None) -> bool:
        """Whether any of these sequences (None: all) slides, or is a fork of a sliding one and so keeps K before
        RoPE."""
        sliding = self._table.sliding
        if sliding.count == 0 or seq_ids is None:
            return sliding.count > 0
        return bool(sliding.windows[self._table.rows(ids_of(seq_ids))].any())

    def match_prefix(
        self,
        sequence: int,
        token_ids: Sequence[int] | Int64Array,
        salt: bytes = b"",
        most_bytes: int | None = None,
    ) -> int:
        """Gives an empty sequence the longest indexed prefix of token_ids in full pages; its length in tokens.

        At least one token is left over to be computed. Where a page of some group covers more positions than others, a
        prefix ends with the coarsest. Groups with a window get the pages that the next query sees, and
        a prefix is found only where these are known. They take as much room as pages of its own would, so that those
        who use them, too, can grow as they have reserved: OutOfPages where there is less.

        salt: at most 16 bytes; only what was published with the same one is found. most_bytes: that a store may copy
        for each position that it makes the prefix longer; None: any number.

        With an encoder, token_ids begin with its prompt, which is padded to whole pages. Only what was published after
        the same one is found, and nothing where not all of the encoder's pages are. Where a group keeps states, a
        prefix ends with a snapshot, which is copied into the sequence's own page; where that finds no room, nothing is
        found.
        """
        self._check_sharing(sequence)
        row = self._table.row(sequence)
        if any(pages.size for pages in self._table.held_pages(row)):
            raise InvalidArgument(f"sequence {sequence} holds pages; only an empty one can take a prefix")
        tokens = integers("token_ids", token_ids)
        most = max(tokens.size - 1, 0) // self.layout.page_size
        border = int(self._table.borders[row])
        num_pages, pages = self._pools.match(tokens, most, self._salt(row, tokens, salt), border, most_bytes)
        try:
            self._pages.share(row, num_pages * self.layout.page_size, pages)
        except OutOfPages:
            if self.layout.recurs:  # the snapshot may be what has to go for the sequence's own state
                return 0
            raise
        self._fences.arrive(row)
        stored = self._table.fetched, self._table.lifted
        for positions, count in zip(stored, (self._pools.num_fetched, self._pools.num_lifted), strict=True):
            positions[row] = min(count, num_pages) * self.layout.page_size
        return num_pages * self.layout.page_size

    def publish_prefix(self, sequence: int, token_ids: Sequence[int] | Int64Array, salt: bytes = b"") -> None:
        """Lets others share the full pages of a sequence that begins with token_ids; its KV must have been computed.

        Of groups with a window those that the sequence still has: a page that a forward drops has to be published
        before that forward begins.

        salt: as in match_prefix, where the sequence begins with what that found. Where a group keeps states, the
        snapshots that the sequence's forwards have left are published.
        """
        self._check_sharing(sequence)
        row = self._settled_row(sequence)
        length, tokens = int(self._table.lengths[row]), integers("token_ids", token_ids)
        if tokens.size > length:
            raise InvalidArgument(f"token_ids has {tokens.size} tokens; sequence {sequence} holds {length}")
        self._pages.publish(row, tokens, self._salt(row, tokens, salt))

    def keep_evicted(self, store: PageStore) -> None:
        """Gives the store the pages that the prefix index evicts from now on. match_prefix finds them there, too. Their
        copies may be under way when calls return: forwards and sends wait for them, and peers by copies_past(). A page
        that is not what it was is as unknown."""
        self._pools.prefixes.keep_evicted(store)
        self._pools.copies = store.copies

    @property
    def has_copies(self) -> bool:
        """Whether a store is there, of evicted pages or of parked sequences."""
        return self._pools.copies is not NO_COPIES

    def copies_past(self) -> Callable[[], bool] | None:
        """Says whether peers may write into pages that are free or reserved now, as far as copies between the pools and
        the stores are in the way; None where they may."""
        return self._pools.copies.mark()

    def has_arrived(self, sequence: int) -> bool:
        """Whether the pages that match_prefix or resume had copied back are there. A forward would wait for them, and
        with it what is launched after it."""
        return self._fences.is_whole(self._table.row(sequence))

    @property
    def page_store(self) -> PageStore | None:
        """The store given to keep_evicted(), if any."""
        return self._pools.prefixes.store

    def room(self, num_tokens: int, longest_append: int | None = None, encoder_len: int = 0) -> Room:
        """Returns the room for one more sequence that reserve() lets grow to num_tokens. encoder_len: see
        add_sequence."""
        border = -(-encoder_len // self.layout.page_size)
        needed = self._pages.needed(*checked_reach(num_tokens, longest_append), border)
        has_place = len(self._table) < self._table.max_sequences
        return Room(needed, tuple(self._pools.num_free), tuple(self._pools.num_pages), has_place)

    @property
    def prefix_position(self) -> int:
        """Grows whenever a page comes into the prefix index or leaves it. Any thread may read it."""
        return self._pools.prefixes.position

    def prefix_changes(self, since: int | None = None, *, stored: bool = False) -> PrefixChanges:
        """Keys of full pages in the prefix index: what came and went since an earlier answer's `position`. All keys for
        None, or where that is too long ago. stored: of pages in the index or in the store below it; none without."""
        return self._pools.prefixes.changes(since, stored=stored)

    def sequence(self, sequence: int) -> SequenceState:
        """Returns the state of a sequence now."""
        table, marks, row, sent = self._table, self._marks, self._table.row(sequence), 0
        if marks.count and marks.ends[row]:
            counts = enumerate(marks.num_slots_sent(row))
            sent = sum(count * self.layout.entry_bytes(group) for group, count in counts)
        where = table.num_positions(row), table.border(row), int(table.encoder_lens[row])
        return SequenceState(*where, sent, int(table.fetched[row]), int(table.lifted[row]))

    @property
    def pages(self) -> PageCounts:
        """The numbers of pages."""
        pools, together, paging = self._pools, self.layout.pages_together, self.layout.paging
        by_positions = [(group, times) for group, times in enumerate(together) if not paging[group].whole]
        total, free = (
            min(counts[group] * times for group, times in by_positions) for counts in (pools.num_pages, pools.num_free)
        )
        counts = PageCounts(total, free, len(pools.prefixes), max(map(mul, pools.num_draining, together)))
        if pools.prefixes.store is not None:
            counts = with_store(counts, pools)
        if self._parked is not None:
            counts = counts._replace(
                parked=self._parked.counts.sequences,
                parked_bytes=self._parked.counts.capacity,
                parked_bytes_used=self._parked.counts.used,
            )
        return self._with_states(counts) if self.layout.recurs else counts

    def _with_states(self, counts: PageCounts) -> PageCounts:
        own = [(group, of) for group, of in enumerate(self._pages.snapshots) if of is not None]
        total, free = (sum(of[group] for group, _ in own) for of in (self._pools.num_pages, self._pools.num_free))
        return counts._replace(
            state_pages=total,
            free_state_pages=free,
            snapshots=sum(of.num_pages for _, of in own),
            snapshot_bytes=sum(of.num_pages * self.layout.page_bytes(group) for group, of in own),
            evicted_snapshots=sum(of.num_evicted for _, of in own),
        )

    def gather_group(self, sequence: int, group: int, begin: int, end: int) -> list[tuple[Tensor, Tensor]]:
        """Copies of (k, v) for each layer of a group, [end - begin, num_kv_heads, head_dim] each, as stored: K rotated,
        FP8 widened. begin, end: of entries; begin may be as early as the group holds positions. With one plane, k and v
        are the same."""
        row = self._table.row(sequence)
        if not 0 <= integer("group", group) < len(self._groups):
            raise InvalidArgument(f"group is {group}; it must be from 0 to {len(self._groups) - 1}")
        length = self.layout.paging[group].num_entries(self._table.num_positions(row))
        if not 0 <= integer("begin", begin) <= integer("end", end) <= length:
            raise InvalidArgument(f"begin and end are {begin} and {end}; they must be 0 ≤ begin ≤ end ≤ {length}")
        first = self._pages.first_positions(row)[group]
        if self.layout.paging[group].whole:
            first = length - 1
        if self.layout.groups[group].keeps.given and end > max(self._table.border(row), begin):
            raise InvalidArgument(f"end is {end}; group {group} has the encoder's {self._table.border(row)} positions")
        if begin < min(first, end):
            raise InvalidArgument(f"begin is {begin}; positions before {first} have left the window of group {group}")
        self._fences.all_of(row)
        layers = range(len(self.layout.groups[group].layers))
        return self._groups[group].gather(layers, row, self._sliding.indices(row, begin, end))

    def _check_encoder_len(self, encoder_len: int) -> None:
        integer("encoder_len", encoder_len)
        if encoder_len and not self.layout.has_encoder:
            raise InvalidArgument(f"encoder_len is {encoder_len}; the layout has no encoder, so it must be 0")
        size = self.layout.page_size
        if self.layout.has_encoder and not 1 <= encoder_len <= self.max_sequence_length // size * size:
            raise InvalidArgument(
                f"encoder_len is {encoder_len}; the layout has an encoder, so it must be from 1 to "
                f"{self.max_sequence_length // size * size}"
            )

    def _salt(self, row: int, token_ids: Int64Array, salt: bytes) -> bytes:
        """Returns the salt under which a row shares prefixes."""
        encoder_len = int(self._table.encoder_lens[row])
        return encoder_salt(token_ids[:encoder_len], salt) if encoder_len else salt

    def _check_sharing(self, sequence: int) -> None:
        if self._table.sliding.windows[self._table.row(sequence)]:
            raise InvalidArgument(f"sequence {sequence} slides; only sequences that do not share prefixes")
