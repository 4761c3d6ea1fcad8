"""The plan of one forward: which tokens go where, and what each sequence attends to. Pure numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.position_map import Int32Array, SlotRuns
from tandem.cache.rope import Rotation

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """How T new tokens of B sequences are packed.

    qo_indptr: int32 [B + 1], tokens qo_indptr[i] … qo_indptr[i + 1] - 1 are those of sequence i.
    seq_lens: int32 [B], positions of each sequence after the append. positions: int32 [T].
    owners: int64 [T], the sequence, 0 … B - 1, of each token.
    """

    qo_indptr: Int32Array
    seq_lens: Int32Array
    positions: Int32Array
    owners: Int64Array


@dataclass(frozen=True, eq=False)
class PageTables:
    """FlashInfer's arrays for one layer group.

    slot_mapping: int32 [T], where each new token's K and V go. kv_indptr: int32 [B + 1]; kv_indices[kv_indptr[i] :
    kv_indptr[i + 1]]: int32, the pages of sequence i, the new tokens' included; kv_last_page_len: int32 [B], 1 …
    page_size.
    """

    slot_mapping: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    kv_last_page_len: Int32Array


@dataclass(frozen=True, eq=False)
class Send:
    """What one forward writes to one PE's pages of one layer group.

    Tokens, layer by layer: rows token_indices (int64 [n]) of the packed tokens to the peer's token_slots (int32 [n]).
    Cached positions, all layers at once before the group's first: own source_slots to target_slots (int32 [m]).
    """

    target_pe: int
    token_indices: Tensor
    token_slots: Tensor
    source_slots: Int32Array
    target_slots: Int32Array


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """One layer group of a forward. kernel_plan is what the group's kernels made of tables; only they read it."""

    tables: PageTables
    sends: tuple[Send, ...]
    kernel_plan: Any


@dataclass(frozen=True, eq=False)
class ForwardPlan:
    """One forward over B sequences, made by PagedKVCache.begin_forward and passed to each attention call.

    rotation is None without RoPE. sent holds (sequence, position up to which its map will have been issued).
    """

    seq_ids: tuple[int, ...]
    tokens: TokenLayout
    groups: tuple[GroupPlan, ...]
    rotation: Rotation | None
    sent: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return self.tokens.positions.size

    @property
    def qo_indptr(self) -> Int32Array:
        return self.tokens.qo_indptr

    @property
    def seq_lens(self) -> Int32Array:
        return self.tokens.seq_lens

    @property
    def positions(self) -> Int32Array:
        return self.tokens.positions


def lay_out_tokens(lengths: Int64Array, appends: Int64Array) -> TokenLayout:
    """lengths: int64 [B], positions before the append; appends: int64 [B], new tokens of each, at least 1."""
    qo_indptr = np.zeros(appends.size + 1, np.int32)
    np.cumsum(appends, out=qo_indptr[1:])
    num_tokens = int(qo_indptr[-1])
    if num_tokens == appends.size:
        owners, positions = np.arange(num_tokens), lengths
    else:
        owners = np.repeat(np.arange(appends.size), appends)
        positions = np.arange(num_tokens) + (lengths - qo_indptr[:-1])[owners]
    return TokenLayout(qo_indptr, (lengths + appends).astype(np.int32), positions.astype(np.int32), owners)


def look_up_pages(pages: Int32Array, rows: Int64Array, tokens: TokenLayout, page_size: int) -> PageTables:
    """pages: int32 [max_sequences, max_pages], a group's page table; rows: int64 [B], the sequences' rows in it."""
    last_places = (tokens.seq_lens - 1) // page_size
    counts = last_places + 1
    kv_indptr = np.zeros(rows.size + 1, np.int32)
    np.cumsum(counts, out=kv_indptr[1:])
    places = tokens.positions // page_size
    token_pages = pages[rows[tokens.owners], places]
    return PageTables(
        slot_mapping=(token_pages - places) * page_size + tokens.positions,
        kv_indptr=kv_indptr,
        kv_indices=_ragged_rows(pages, rows, counts),
        kv_last_page_len=tokens.seq_lens - last_places * page_size,
    )


def slots_of(pages: Int32Array, positions: Int64Array, page_size: int) -> Int32Array:
    """int32 [n]: slots of positions (int64 [n]) of a sequence whose page ids are `pages`."""
    return pages[positions // page_size] * np.int32(page_size) + (positions % page_size).astype(np.int32)


def runs_of(pages: Int32Array, begin: int, end: int, page_size: int) -> SlotRuns:
    """Slots of positions begin … end - 1 (begin < end) of a sequence whose page ids are `pages`, in the fewest runs."""
    first, last = begin // page_size, (end - 1) // page_size
    used = pages[first : last + 1].astype(np.int64)
    starts = np.append(0, np.flatnonzero(np.diff(used) != 1) + 1)
    begins = used[starts] * page_size
    lengths = np.diff(np.append(starts, used.size)) * page_size
    skipped = begin - first * page_size
    begins[0] += skipped
    lengths[0] -= skipped
    lengths[-1] -= (last + 1) * page_size - end
    return SlotRuns(begins.astype(np.int32), lengths.astype(np.int32))


def _ragged_rows(pages: Int32Array, rows: Int64Array, counts: Int32Array) -> Int32Array:
    """The first counts[i] entries of row rows[i], one after another."""
    widest, total = int(counts.max()), int(counts.sum())
    if widest * rows.size <= 2 * total:  # copy whole rows, then drop what is too much: fastest when lengths are alike
        square = pages[:, :widest][rows]
        return (
            square.reshape(-1)
            if widest * rows.size == total
            else square[np.arange(widest, dtype=np.int32) < counts[:, None]]
        )
    begins = np.cumsum(counts) - counts
    flat = np.arange(total) + np.repeat(rows * pages.shape[1] - begins, counts)
    return pages.reshape(-1).take(flat)
