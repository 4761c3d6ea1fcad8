"""The parts that FlashInfer computes a forward in: single tokens, prompts, and what is before token trees."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.flashinfer.sharing import SharedPart
from tandem.cache.kernels.tree_contexts import TreeContexts
from tandem.cache.kernels.triton.tree import TreeTiles, lay_out_tiles
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array, indptr_of, ragged_range
from tandem.cache.plan.tables import PageTables, TokenLayout, own_tables

GATHER_FROM = 1024  # new tokens from which attention over gathered K and V is faster, the gathering included
GATHER_FP8_FROM = 192  # the same over 8 bits, which FlashInfer otherwise widens for every block of queries


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """Some sequences of a forward, all with one new token each, all with several, or all with nodes of trees.

    tokens: int64 [n], on the device, theirs among the packed ones; None: all. qo_indptr, kv_indptr, kv_last_page_len:
    FlashInfer's arrays, int32, on the host, where its planning reads them; kv_indices on the device. kv_slots: int32,
    on the device, of all positions that they attend to, where these are gathered first; kv_indptr then counts them.
    trees: of nodes, whose arrays then tell only what all nodes of a tree see before it. shared: further pages, which
    the sequences of single tokens attend to together.
    """

    single: bool
    tokens: Tensor | None
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    kv_slots: Tensor | None
    trees: TreeTiles | None
    shared: SharedPart | None


def plan_parts(
    tokens: TokenLayout,
    tables: PageTables,
    page_size: int,
    device: torch.device,
    gather_from: int = GATHER_FROM,
    window: int | None = None,
) -> tuple[Tensor, tuple[AttentionPart, ...]]:
    """tables.slot_mapping on the device, and parts that cover every token once; all of it in one copy.

    gather_from: new tokens of prompts from which their K and V are gathered. window: of the layers.
    """
    single, in_trees = tokens.single, tokens.in_trees
    contexts, tiles = lay_out_tiles(tokens, tables, page_size, window)
    groups = [np.flatnonzero(of) for of in (single, ~single & ~in_trees, in_trees)]
    drafts = [
        _draft(tokens, tables, sequences, of_trees, page_size, gather_from)
        for sequences, of_trees in zip(groups, (None, None, contexts), strict=True)
        if sequences.size
    ]
    of_parts = [(draft.kv_indices, draft.tokens, draft.kv_slots) for draft in drafts]
    arrays = [tables.slot_mapping, *tiles, *(array for of_part in of_parts for array in of_part)]
    slots, *uploaded = upload(arrays, device)
    trees = TreeTiles(*uploaded[: len(tiles)]) if tiles else None
    uploaded = uploaded[len(tiles) :]
    shared = None if tables.shared is None else SharedPart.of(tables.shared, single, device)
    parts = tuple(
        draft.placed(pages, rows if len(drafts) > 1 else None, kv_slots, trees, shared)
        for draft, pages, rows, kv_slots in zip(drafts, uploaded[::3], uploaded[1::3], uploaded[2::3], strict=True)
    )
    return slots, parts


@dataclass(frozen=True, eq=False)
class _Draft:
    single: bool
    of_trees: bool
    tokens: NDArray[np.int64]
    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    kv_last_page_len: Int32Array
    kv_slots: Int32Array

    def placed(
        self, pages: Tensor, tokens: Tensor | None, kv_slots: Tensor, trees: TreeTiles | None, shared: SharedPart | None
    ) -> AttentionPart:
        """The part, with its arrays on the device and what there is of trees and of shared pages in the forward."""
        return AttentionPart(
            self.single,
            tokens,
            torch.from_numpy(self.qo_indptr),
            torch.from_numpy(self.kv_indptr),
            pages,
            torch.from_numpy(self.kv_last_page_len),
            kv_slots if self.kv_slots.size else None,
            trees if self.of_trees else None,
            shared if self.single else None,
        )


def _draft(
    tokens: TokenLayout,
    tables: PageTables,
    sequences: NDArray[np.int64],
    contexts: TreeContexts | None,
    page_size: int,
    gather_from: int,
) -> _Draft:
    """An AttentionPart of `sequences` (int64 [n]), before anything is on the device; no kv_slots: not gathered.

    contexts: those of all trees, which are of these sequences. Where no position is seen by all nodes, one stands in.
    """
    tables = own_tables(tables, sequences, page_size)
    places, lengths = tables.kv_indptr[:-1], tables.kv_lens
    if contexts is not None:
        places = places + contexts.commons // page_size
        lengths = np.maximum(contexts.bases - contexts.commons, 1).astype(np.int32)
    counts = -(-lengths // page_size)
    appends = np.diff(tokens.qo_indptr)[sequences]
    pages = tables.kv_indices[ragged_range(places, counts)]
    gathered = contexts is None and int(appends.max()) > 1 and int(appends.sum()) >= gather_from
    return _Draft(
        single=bool(appends[0] == 1) and contexts is None,
        of_trees=contexts is not None,
        tokens=ragged_range(tokens.qo_indptr[sequences], appends),
        qo_indptr=indptr_of(appends),
        kv_indptr=indptr_of(lengths if gathered else counts),
        kv_indices=pages,
        kv_last_page_len=lengths - (counts - 1) * page_size,
        kv_slots=all_slots(pages, counts, lengths, page_size) if gathered else pages[:0],
    )


def all_slots(pages: Int32Array, counts: Int32Array, lengths: Int32Array, page_size: int) -> Int32Array:
    """Slots of the lengths[i] positions on counts[i] of `pages`, sequence after sequence."""
    slots = (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)
    begins = ((np.cumsum(counts) - counts) * page_size).astype(np.int32)
    return slots[ragged_range(begins, lengths)]
