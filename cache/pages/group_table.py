"""The pages of one layer group that the sequences of a cache hold, as arrays."""

import numpy as np

from tandem.cache.plan.arrays import Int32Array, Int64Array, ragged_pairs


class GroupTable:
    """One row a sequence, the same in every group. Place i of a row is the page of its positions from i · page_size on.

    pages: int32 [max_sequences, max_pages], of which row i holds places begins[i] … ends[i] - 1 (int64 [max_sequences]
    each): places before have left the group's window, places past the sequence's end are reserved. budgets: int64
    [max_sequences], the pages that a reservation keeps for a row from the first on that is its own; 0 without one.
    num_changes: how often a row has lost a page that it held, or got another in its place, and went on; but by a window
    or as sequences slide, which share nothing.
    """

    def __init__(self, max_sequences: int, max_pages: int) -> None:
        self.pages = np.zeros((max_sequences, max_pages), np.int32)
        self.begins = np.zeros(max_sequences, np.int64)
        self.ends = np.zeros(max_sequences, np.int64)
        self.budgets = np.zeros(max_sequences, np.int64)
        self.num_changes = 0

    def reset(self, row: int) -> None:
        self.begins[row] = self.ends[row] = self.budgets[row] = 0

    def held(self, row: int, begin: int = 0, end: int | None = None) -> Int32Array:
        """A copy of the page ids at those of places begin … end - 1 that a row holds; end None: all."""
        first, last = max(begin, int(self.begins[row])), int(self.ends[row])
        return self.pages[row, first : last if end is None else min(end, last)].copy()

    def take_out(self, rows: Int64Array, begins: Int64Array, ends: Int64Array) -> Int32Array:
        """Takes away those of places begins[i] … ends[i] - 1 that rows[i] (distinct; all int64 [n]) holds from its
        first place on; later ones move up."""
        held = self.ends[rows]
        begins, ends = np.minimum(begins, held), np.minimum(ends, held)
        gone = self.held_between(rows, begins, ends)
        self.put(rows, begins, held - ends, self.held_between(rows, ends, held))
        self.ends[rows] = begins + held - ends
        return gone

    def held_between(self, rows: Int64Array, begins: Int64Array, ends: Int64Array) -> Int32Array:
        """The page ids at places begins[i] … ends[i] - 1 of rows[i], one row after another; all int64 [B]."""
        return self.pages[ragged_pairs(rows, begins, ends - begins)]

    def put(self, rows: Int64Array, begins: Int64Array, counts: Int64Array, pages: Int32Array) -> None:
        """Hands pages (int32 [sum of counts]) to rows: counts[i] of them to rows[i], from place begins[i] on."""
        self.pages[ragged_pairs(rows, begins, counts)] = pages
