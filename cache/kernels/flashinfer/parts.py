"""The parts of a forward that FlashInfer computes one by one, each by a wrapper."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache.kernels.flashinfer.sharing import SharedPart
from tandem.cache.kernels.index_keys import Choosers
from tandem.cache.kernels.tree_contexts import TreeContexts
from tandem.cache.kernels.triton.index_scores import SeenPages
from tandem.cache.kernels.triton.tree import TreeTiles, lay_out_tiles
from tandem.cache.kernels.upload import upload
from tandem.cache.plan.arrays import Int32Array, IntArray, indptr_of, ragged_range
from tandem.cache.plan.tables import PageTables, TokenLayout, own_tables

Group = tuple[NDArray[np.bool_], bool]
"""bool [B]: which sequences make a part; and whether their K and V, or latents, are gathered first."""


@dataclass(frozen=True, eq=False)
class AttentionPart:
    """Some sequences of a forward, which have n new tokens: one each (single), any number, or nodes of trees.

    qo_indptr, kv_indptr, kv_lens and kv_last_page_len: FlashInfer's arrays, int32, on the host, where its planning
    reads them. kv_indices: int32, on the device. tokens: int64 [n], on the device, theirs among the packed ones; None:
    all.
    kv_slots: int32, on the device, of all positions that they attend to, where these are gathered first; kv_indptr then
    counts positions. trees: of nodes; the arrays then say only what all nodes of a tree see before it. shared: further
    pages, which the sequences of single tokens attend to together.
    """

    single: bool
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor
    kv_last_page_len: Tensor
    kv_indices: Tensor
    tokens: Tensor | None
    kv_slots: Tensor | None
    trees: TreeTiles | None
    shared: SharedPart | None


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """n tokens that attend to chosen positions, see Choosers: tokens int64 [n], firsts int32 [n] and kv_indices int32,
    on the device."""

    tokens: Tensor
    firsts: Tensor
    kv_indices: Tensor

    @classmethod
    def of(cls, choosers: Choosers, kv_indices: Int32Array, device: torch.device) -> "ChosenTokens | None":
        if choosers.tokens.size == 0:
            return None
        return cls(*upload([choosers.tokens, choosers.firsts, kv_indices], device))


@dataclass(frozen=True, eq=False)
class SeenTokens:
    """Tokens that attend absorbed to all that they see: int64 [n], theirs among the packed ones. longest: the most
    positions of one."""

    tokens: Tensor
    pages: SeenPages
    longest: int


def plan_parts(
    tokens: TokenLayout,
    tables: PageTables,
    groups: Sequence[Group],
    page_size: int,
    device: torch.device,
    window: int | None = None,
    *,
    others: bool = False,
) -> tuple[Tensor, tuple[AttentionPart, ...]]:
    """Returns tables.slot_mapping on the device, and parts that cover every token once. One copy uploads all.

    groups: of the sequences without trees; those with trees make one more. window: of the layers. others: some
    sequences are in no group.
    """
    contexts, tiles = lay_out_tiles(tokens, tables, page_size, window)
    drafts = [_draft(tokens, tables, which, gathered, None, page_size) for which, gathered in groups if which.any()]
    if contexts is not None:
        drafts.append(_draft(tokens, tables, tokens.in_trees, False, contexts, page_size))
    arrays = [tables.slot_mapping, *tiles, *(array for draft in drafts for array in draft.on_device)]
    slots, *uploaded = upload(arrays, device)
    trees = TreeTiles(*uploaded[: len(tiles)]) if tiles else None
    uploaded = uploaded[len(tiles) :]
    shared = None if tables.shared is None else SharedPart.of(tables.shared, tokens.single, device)
    parts = tuple(
        AttentionPart(
            draft.single,
            *map(torch.from_numpy, draft.on_host),
            kv_indices=pages,
            tokens=rows if len(drafts) > 1 or others else None,
            kv_slots=kv_slots if kv_slots.shape[0] else None,
            trees=trees if draft is drafts[-1] else None,
            shared=shared if draft.single else None,
        )
        for draft, pages, rows, kv_slots in zip(drafts, uploaded[::3], uploaded[1::3], uploaded[2::3], strict=True)
    )
    return slots, parts


class _Draft(NamedTuple):
    """An AttentionPart before anything is on the device. on_host: qo_indptr to kv_last_page_len; on_device: kv_indices,
    tokens and kv_slots, which are empty where nothing is gathered."""

    single: bool
    on_host: tuple[Int32Array, ...]
    on_device: tuple[IntArray, ...]


def _draft(
    tokens: TokenLayout,
    tables: PageTables,
    which: NDArray[np.bool_],
    gathered: bool,
    contexts: TreeContexts | None,
    page_size: int,
) -> _Draft:
    """contexts: of all trees. The sequences are the trees'. Where all nodes see no position, one stands in."""
    sequences = np.flatnonzero(which)
    tables = own_tables(tables, sequences, page_size)
    firsts, lengths = tables.kv_indptr[:-1], tables.kv_lens
    if contexts is not None:
        firsts = firsts + contexts.commons // page_size
        lengths = np.maximum(contexts.bases - contexts.commons, 1).astype(np.int32)
    counts = -(-lengths // page_size)
    appends = np.diff(tokens.qo_indptr)[sequences]
    pages = tables.kv_indices[ragged_range(firsts, counts)]
    kv_slots = all_slots(pages, counts, lengths, page_size) if gathered else pages[:0]
    kv_indptr, last = indptr_of(lengths if gathered else counts), lengths - (counts - 1) * page_size
    rows = ragged_range(tokens.qo_indptr[sequences], appends)
    single = contexts is None and rows.size == sequences.size
    return _Draft(single, (indptr_of(appends), kv_indptr, lengths, last), (pages, rows, kv_slots))


def all_slots(pages: Int32Array, counts: Int32Array, lengths: Int32Array, page_size: int) -> Int32Array:
    """Slots of the lengths[i] positions on counts[i] of `pages`, sequence after sequence."""
    slots = (pages[:, None] * page_size + np.arange(page_size, dtype=np.int32)).reshape(-1)
    begins = ((np.cumsum(counts) - counts) * page_size).astype(np.int32)
    return slots[ragged_range(begins, lengths)]
