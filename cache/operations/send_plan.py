"""What one forward sends: cached positions page to page, new ones token by token, for all marked sequences at once."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.cache.pages.send_marks import SendMarks, Sent
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.arrays import Int32Array, Int64Array, ragged_pairs
from tandem.cache.plan.position_map import SKIP
from tandem.cache.plan.tables import Send, TokenLayout, slots_of

Sends = list[tuple[Send, ...]]
"""Per layer group."""
NO_SLOTS = (np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, eq=False)
class _Due:
    """What is due of m marked rows, int64 [m] each: positions begins … middles - 1 were cached before the forward,
    middles … ends - 1 are new.

    entries and tokens: from a position to where its slots stand in the maps, and to its row among the packed tokens.
    """

    rows: Int64Array
    begins: Int64Array
    middles: Int64Array
    ends: Int64Array
    entries: Int64Array
    tokens: Int64Array

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
    pes = marks.target_pes[due.rows]
    targets = sorted(set(pes.tolist()))
    of_pes = [_plan_sends_to(pe, due if len(targets) == 1 else due.of(pes == pe), marks, table) for pe in targets]
    return list(zip(*of_pes, strict=True)), marks.take(due.rows, due.ends)


def _find_due(marks: SendMarks, table: SequenceTable, rows: Int64Array, firsts: Int32Array, lasts: Int32Array) -> _Due:
    """firsts, lasts: int32 [m], tokens firsts[i] … lasts[i] - 1 are those of rows[i]."""
    lengths = table.lengths[rows] + table.sliding.dropped[rows]
    cached, begins = lengths - (lasts - firsts), marks.planned[rows]
    ends = np.maximum(np.minimum(lengths, marks.ends[rows]), begins)
    middles = np.maximum(np.minimum(cached, ends), begins)
    return _Due(rows, begins, middles, ends, marks.slots.offsets[rows] - marks.begins[rows], firsts - cached)


def _plan_sends_to(pe: int, due: _Due, marks: SendMarks, table: SequenceTable) -> list[Send]:
    """Per layer group."""
    aheads, tokens = ragged_pairs(due.entries - due.tokens, due.middles + due.tokens, due.ends - due.middles)
    entries = tokens + aheads
    sends = []
    for slots, cached in zip(marks.slots.slots, _cached_slots(due, marks, table), strict=True):
        targets = slots[entries]
        wanted = targets != SKIP
        sends.append(Send(pe, torch.from_numpy(tokens[wanted]), torch.from_numpy(targets[wanted]), *cached))
    return sends


def _cached_slots(due: _Due, marks: SendMarks, table: SequenceTable) -> list[tuple[Int32Array, Int32Array]]:
    """Per layer group source_slots and target_slots of a Send."""
    counts = due.middles - due.begins
    if not np.count_nonzero(counts):
        return [NO_SLOTS] * len(table.groups)
    of, positions = ragged_pairs(np.arange(counts.size), due.begins, counts)
    rows, entries = due.rows[of], positions + due.entries[of]
    indices = table.sliding.indices_of(rows, positions)
    found = []
    for slots, group in zip(marks.slots.slots, table.groups, strict=True):
        targets = slots[entries]
        wanted = targets != SKIP
        found.append((slots_of(group.pages, rows[wanted], indices[wanted], table.page_size), targets[wanted]))
    return found
