"""Plans what one forward sends for all marked sequences: cached positions page to page, new positions token by
token."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.cache.pages.group_table import GroupTable
from tandem.cache.pages.send_marks import SendMarks, Sent
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.arrays import Int32Array, Int64Array, ragged_pairs
from tandem.cache.plan.position_map import SKIP
from tandem.cache.plan.tables import Send, TokenLayout

Sends = list[tuple[Send, ...]]
"""The sends of each layer group."""
NO_SLOTS = (np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, eq=False)
class _Due:
    """The entries due in m marked rows, int64 [m] each. Entries begins … middles - 1 were cached before the forward,
    middles … ends - 1 are new.

    to_slots and to_tokens: added to an entry, they give its place among the maps' slots and its row among the packed
    new entries.
    """

    rows: Int64Array
    begins: Int64Array
    middles: Int64Array
    ends: Int64Array
    to_slots: Int64Array
    to_tokens: Int64Array

    def of(self, which: NDArray[np.bool_]) -> "_Due":
        return _Due(*(array[which] for array in vars(self).values()))


def plan_sends(
    marks: SendMarks, table: SequenceTable, rows: Int64Array, tokens: TokenLayout, *, push: bool = True
) -> tuple[Sends, Sent | None]:
    """Sends of the forward that has grown rows (int64 [B]) by `tokens`, and what is to be committed when it has ended.

    What is sent counts as planned from now on. push: whether anything is sent.
    """
    nothing: Sends = [()] * len(table.groups)
    if marks.count == 0 or not push:
        return nothing, None
    marked = (marks.planned[rows] < marks.ends[rows]).nonzero()[0]
    if marked.size == 0:
        return nothing, None
    due = _find_due(marks, table, rows[marked], tokens.qo_indptr[marked], tokens.qo_indptr[marked + 1])
    dues = {every: _of_entries(due, every, marks, tokens, marked) for every in dict.fromkeys(marks.every)}
    pes = marks.target_pes[due.rows]
    sends = []
    for pe in sorted(set(pes.tolist())):
        own = dues if pes.size == 1 else {every: one.of(pes == pe) for every, one in dues.items()}
        sends.append(_plan_sends_to(pe, own, marks, table))
    return list(zip(*sends, strict=True)), marks.take(due.rows, due.ends)


def _find_due(marks: SendMarks, table: SequenceTable, rows: Int64Array, firsts: Int32Array, lasts: Int32Array) -> _Due:
    """Finds the due entries of one position. firsts, lasts: int32 [m]; tokens firsts[i] … lasts[i] - 1 belong to
    rows[i]."""
    lengths = table.lengths[rows] + table.sliding.dropped[rows]
    cached, begins = lengths - (lasts - firsts), marks.planned[rows]
    ends = np.maximum(np.minimum(lengths, marks.ends[rows]), begins)
    middles = np.maximum(np.minimum(cached, ends), begins)
    return _Due(rows, begins, middles, ends, marks.slots.offsets[rows] - marks.begins[rows], firsts - cached)


def _of_entries(due: _Due, every: int, marks: SendMarks, tokens: TokenLayout, marked: Int64Array) -> _Due:
    """Returns the entries of `every` positions that the positions of `due` complete. marked: int64 [m], whose
    sequences these are."""
    if every == 1:
        return due
    cached, starts = tokens.qo_indptr[marked] - due.to_tokens, marks.begins[due.rows]
    to_tokens = tokens.entries(every).qo_indptr[marked] - cached // every
    to_slots = marks.slots.offsets[due.rows] - starts // every
    return _Due(due.rows, due.begins // every, due.middles // every, due.ends // every, to_slots, to_tokens)


def _plan_sends_to(pe: int, dues: dict[int, _Due], marks: SendMarks, table: SequenceTable) -> list[Send]:
    """Plans the sends of each layer group to one PE. dues: what is due, by the positions of an entry."""
    new = {every: _new_entries(due) for every, due in dues.items()}
    cached = {every: _cached_entries(due) for every, due in dues.items()}
    sends = []
    for slots, every, group in zip(marks.slots.slots, marks.every, table.groups, strict=True):
        tokens, places = new[every]
        targets = slots[places]
        wanted = targets != SKIP
        sources = _cached_slots(slots, group, table, cached[every])
        sends.append(Send(pe, torch.from_numpy(tokens[wanted]), torch.from_numpy(targets[wanted]), *sources))
    return sends


def _new_entries(due: _Due) -> tuple[Int64Array, Int64Array]:
    """int64 [n] both: rows of what is new among the packed entries, and where its slots stand in the maps."""
    aheads, tokens = ragged_pairs(due.to_slots - due.to_tokens, due.middles + due.to_tokens, due.ends - due.middles)
    return tokens, tokens + aheads


def _cached_entries(due: _Due) -> tuple[Int64Array, Int64Array, Int64Array] | None:
    """int64 [n] each: the rows of the table and the entries in them that were cached before, and where their slots
    stand in the maps; None where there are none."""
    counts = due.middles - due.begins
    if not np.count_nonzero(counts):
        return None
    of, entries = ragged_pairs(np.arange(counts.size), due.begins, counts)
    return due.rows[of], entries, entries + due.to_slots[of]


def _cached_slots(
    slots: Int32Array,
    group: GroupTable,
    table: SequenceTable,
    cached: tuple[Int64Array, Int64Array, Int64Array] | None,
) -> tuple[Int32Array, Int32Array]:
    """source_slots and target_slots of a Send. slots: of the maps, of this group; cached: see _cached_entries."""
    if cached is None:
        return NO_SLOTS
    rows, entries, places = cached
    targets = slots[places]
    wanted = targets != SKIP
    indices = table.sliding.indices_of(rows, entries)
    return group.slots(rows[wanted], indices[wanted]), targets[wanted]
