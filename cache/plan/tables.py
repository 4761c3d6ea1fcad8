"""The tokens of one forward: their layout, the page tables of each layer group, and what is sent."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.plan.arrays import Int32Array, Int64Array, indptr_of, ragged_range, ragged_rows
from tandem.cache.plan.position_map import SKIP, SlotRuns
from tandem.cache.plan.shared_prefixes import SharedPrefixes
from tandem.cache.plan.token_tree import TokenTrees


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """How T new tokens of B sequences are packed.

    qo_indptr: int32 [B + 1], tokens qo_indptr[i] … qo_indptr[i + 1] - 1 belong to sequence i. seq_lens: int32 [B],
    positions stored of each sequence after the append. positions: int32 [T], among those. owners: int64 [T], the
    sequence, 0 … B - 1, of each token. trees: the sequences whose new tokens are nodes of trees, which do not see all
    earlier positions; None without trees. preceding: int32 [B], see apart(); else None.
    """

    qo_indptr: Int32Array
    seq_lens: Int32Array
    positions: Int32Array
    owners: Int64Array
    trees: TokenTrees | None = None
    preceding: Int32Array | None = None

    def apart(self) -> "TokenLayout":
        """Each token as a sequence of its own, that ends with it. `preceding` says how many of the tokens right before
        it are of its sequence."""
        count = self.positions.size
        first = self.positions[self.qo_indptr[self.owners]]
        indptr = np.arange(count + 1, dtype=np.int32)
        return TokenLayout(
            indptr, self.positions + np.int32(1), self.positions, np.arange(count), preceding=self.positions - first
        )

    def lasts(self) -> "TokenLayout":
        """The last token of each sequence alone."""
        count = self.seq_lens.size
        indptr = np.arange(count + 1, dtype=np.int32)
        return TokenLayout(indptr, self.seq_lens, self.seq_lens - np.int32(1), np.arange(count))

    def entries(self, every: int) -> "EntryLayout":
        """The entries of `every` positions each that the tokens complete. Nodes of a tree complete none."""
        if self.each_one:
            after = self.seq_lens // np.int32(every)
            complete = after * np.int32(every) == self.seq_lens
            owners = complete.nonzero()[0]
            return EntryLayout(indptr_of(complete), after, after[owners] - np.int32(1), owners)
        lengths = self.seq_lens.astype(np.int64)
        before, after = (lengths - np.diff(self.qo_indptr)) // every, lengths // every
        counts = after - before
        positions = ragged_range(before, counts).astype(np.int32)
        owners = np.arange(counts.size).repeat(counts)
        return EntryLayout(indptr_of(counts), after.astype(np.int32), positions, owners)

    @property
    def each_one(self) -> bool:
        """Whether every sequence has one new token."""
        return self.positions.size == self.seq_lens.size

    @property
    def in_trees(self) -> NDArray[np.bool_]:
        """bool [B]: whether a sequence's new tokens are nodes of a tree."""
        found = np.zeros(self.seq_lens.size, np.bool_)
        if self.trees is not None:
            found[self.trees.sequences] = True
        return found

    @property
    def single(self) -> NDArray[np.bool_]:
        """bool [B]: whether a sequence has one new token, which sees all."""
        single = np.ones(self.seq_lens.size, np.bool_) if self.each_one else np.diff(self.qo_indptr) == 1
        if self.trees is not None:
            single[self.trees.sequences] = False
        return single

    @property
    def rope_positions(self) -> Int64Array:
        """int64 [T]: where each token stands in its text: a node as many positions after the base as its depth."""
        positions = self.positions.astype(np.int64)
        if self.trees is not None:
            trees = self.trees
            bases = self.seq_lens[trees.sequences] - trees.sizes
            appends = np.diff(self.qo_indptr)[trees.sequences]
            positions[trees.tokens] = np.repeat(bases, appends) + trees.depths
        return positions


class EntryLayout(TokenLayout):
    """A TokenLayout whose tokens are entries for several positions. A sequence may have no new entry, or no entry at
    all."""

    @property
    def each_one(self) -> bool:
        return False


class StateWrites(NamedTuple):
    """Snapshots of states that one forward writes, int64 [n] each. The state of the batch's sequences[i] after its
    first tokens[i] new tokens goes to pages[i]. Snapshots of one sequence stand together, in the order of tokens."""

    sequences: Int64Array
    tokens: Int64Array
    pages: Int64Array

    def apart(self, tokens: TokenLayout) -> "StateWrites":
        """Returns the writes with each token as a sequence of its own, see TokenLayout.apart."""
        return StateWrites(tokens.qo_indptr[self.sequences] + self.tokens - 1, np.ones_like(self.tokens), self.pages)


NO_WRITES = StateWrites(*(np.empty(0, np.int64) for _ in range(3)))


@dataclass(frozen=True, eq=False)
class PageTables:
    """FlashInfer's arrays for one layer group.

    slot_mapping: int32 [T], where each new token's K and V go. kv_indptr: int32 [B + 1]; kv_indices[kv_indptr[i] :
    kv_indptr[i + 1]]: int32, the pages of sequence i, the new tokens' included, without those that have left the
    window; kv_last_page_len: int32 [B], 1 … page_size. kv_lens: int32 [B], the positions in those pages: the last
    kv_lens[i] of seq_lens[i]. shared: what sequences with one new token each attend to together, where that is faster;
    their pages are in kv_indices all the same. Of a group that keeps states, writes: snapshots to be left; drafted:
    whether compute_again() follows.
    """

    slot_mapping: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    kv_last_page_len: Int32Array
    kv_lens: Int32Array
    shared: SharedPrefixes | None = None
    writes: StateWrites = NO_WRITES
    drafted: bool = False


@dataclass(frozen=True, eq=False)
class Send:
    """The writes of one forward to one PE's pages of one layer group.

    Tokens, layer by layer: rows token_indices (int64 [n]) of the packed tokens to the peer's token_slots (int32 [n]).
    Cached positions, all layers at once before the group's first: own source_slots to target_slots (int32 [m]).
    """

    target_pe: int
    token_indices: Tensor
    token_slots: Tensor
    source_slots: Int32Array
    target_slots: Int32Array


def lay_out_tokens(lengths: Int64Array, appends: Int64Array) -> TokenLayout:
    """lengths: int64 [B], positions before the append; appends: int64 [B], new tokens of each, at least 1."""
    qo_indptr, owners, positions = indptr_of(appends), np.arange(appends.size), lengths
    if int(qo_indptr[-1]) != appends.size:
        owners = owners.repeat(appends)
        positions = ragged_range(lengths, appends)
    return TokenLayout(qo_indptr, (lengths + appends).astype(np.int32), positions.astype(np.int32), owners)


def look_up_pages(
    pages: Int32Array,
    rows: Int64Array,
    tokens: TokenLayout,
    page_size: int,
    begins: Int64Array | None = None,
    shared: SharedPrefixes | None = None,
) -> PageTables:
    """pages: int32 [max_sequences, max_pages], a group's page table; rows: int64 [B], the sequences' rows in it.

    begins: int64 [B], the first page index that each row holds; None: 0. shared: see PageTables.
    """
    page_indexes = tokens.positions // page_size
    if tokens.each_one:
        last_page_indexes, token_rows = page_indexes, rows
    else:
        last_page_indexes, token_rows = (tokens.seq_lens - 1) // page_size, rows[tokens.owners]
    counts, kv_lens = last_page_indexes + 1, tokens.seq_lens
    if begins is not None:
        first_page_indexes = begins.astype(np.int32)
        counts, kv_lens = counts - first_page_indexes, kv_lens - first_page_indexes * np.int32(page_size)
    kv_indptr = indptr_of(counts)
    return PageTables(
        slot_mapping=(pages[token_rows, page_indexes] - page_indexes) * page_size + tokens.positions,
        kv_indptr=kv_indptr,
        kv_indices=ragged_rows(pages, rows, kv_indptr, begins),
        kv_last_page_len=tokens.seq_lens - last_page_indexes * page_size,
        kv_lens=kv_lens,
        shared=shared,
    )


def own_tables(tables: PageTables, sequences: Int64Array, page_size: int) -> PageTables:
    """The tables of `sequences` (int64 [n]) without the pages that the segments of tables.shared cover, which are never
    all of a sequence's. slot_mapping is left as it is."""
    begins = 0 if tables.shared is None else tables.shared.own_begins[sequences]
    counts = np.diff(tables.kv_indptr)[sequences] - begins
    return PageTables(
        slot_mapping=tables.slot_mapping,
        kv_indptr=indptr_of(counts),
        kv_indices=tables.kv_indices[ragged_range(tables.kv_indptr[sequences] + begins, counts)],
        kv_last_page_len=tables.kv_last_page_len[sequences],
        kv_lens=(tables.kv_lens[sequences] - begins * page_size).astype(np.int32),
    )


def slots_of(pages: Int32Array, rows: Int64Array | int, positions: Int64Array, page_size: int) -> Int32Array:
    """int32 [n]: slots of positions[i] of rows[i] (int64 [n] each), or of one row, of `pages`, a group's page table."""
    page_indexes = positions // page_size
    return pages[rows, page_indexes] * np.int32(page_size) + (positions - page_indexes * page_size).astype(np.int32)


def runs_of(
    pages: Int32Array,
    begin: int,
    end: int,
    page_size: int,
    first_page_index: int = 0,
    end_page_index: int | None = None,
) -> SlotRuns:
    """Slots of positions begin … end - 1 of a sequence whose page ids are `pages`, in the fewest runs.

    Positions before page first_page_index are skipped, and positions from page end_page_index on.
    """
    if begin == end:
        return SlotRuns.from_slots([])
    first, last = begin // page_size, (end - 1) // page_size
    used = pages[first : last + 1].copy()
    used[: max(first_page_index - first, 0)] = SKIP
    if end_page_index is not None:
        used[max(end_page_index - first, 0) :] = SKIP
    runs = SlotRuns.from_slots(used)  # of whole pages
    lead = begin - first * page_size
    begins, lengths = runs.begins * np.int32(page_size), runs.lengths * np.int32(page_size)
    begins[0] += lead
    lengths[0] -= lead
    lengths[-1] -= (last + 1) * page_size - end
    return SlotRuns(np.where(runs.begins == SKIP, np.int32(SKIP), begins), lengths)
