"""The pages of one layer group that the sequences of a cache hold, as arrays."""

import numpy as np

from tandem.cache.plan.arrays import Int32Array, Int64Array, ragged_pairs
from tandem.cache.plan.position_map import SKIP, SlotRuns
from tandem.cache.plan.spans import Paging
from tandem.cache.plan.tables import runs_of, slots_of


class GroupTable:
    """The page tables of a layer group: one row a sequence, the same in every group.

    Page index i of a row is the page of its entries from i · page_size on; there is one for `every` positions. Row i
    holds page indexes begins[i] to ends[i] - 1. Earlier pages have left the group's window, and pages past the
    sequence's end are reserved. A page that covers a whole sequence has page index 0, and its only slot is for the
    sequence's last position.
    """

    def __init__(
        self,
        max_sequences: int,
        max_pages: int,
        paging: Paging,
        borders: Int64Array | None = None,
    ) -> None:
        """borders: see SequenceTable, which owns it; None: no row has one."""
        self.paging, self.page_size, self.every = paging, paging.entries, paging.every
        self.borders = np.zeros(max_sequences, np.int64) if borders is None else borders
        self.pages = np.zeros((max_sequences, max_pages), np.int32)
        self.begins = np.zeros(max_sequences, np.int64)
        self.ends = np.zeros(max_sequences, np.int64)
        self.shown = np.zeros(max_sequences, np.int64)
        """First page of the text that no window has dropped, whatever its page index, for rows that slide."""
        self.budgets = np.zeros(max_sequences, np.int64)
        """Pages that a reservation keeps for a row, from the first that it holds; 0 without a reservation."""
        self.num_changes = 0
        """How often a row lost a page, or got another instead, and went on; windows and slides do not count."""

    def slots(self, rows: Int64Array | int, entries: Int64Array) -> Int32Array:
        """int32 [n]: the slots of entries[i] of rows[i] (int64 [n] each), or of one row."""
        if self.paging.whole:
            return self.pages[rows, np.zeros_like(entries)]
        return slots_of(self.pages, rows, entries, self.page_size)

    def runs(self, row: int, begin: int, end: int) -> SlotRuns:
        """The slots of positions begin … end - 1 of a row in the fewest runs, SKIP where the row holds no page."""
        if not self.paging.whole:
            first, last = (self.paging.num_entries(position) for position in (begin, end))
            return runs_of(self.pages[row], first, last, self.page_size, int(self.begins[row]), int(self.ends[row]))
        skipped = [SKIP] * (end - begin > 1)
        begins, lengths = [*skipped, int(self.pages[row, 0])], [*[end - begin - 1] * len(skipped), 1]
        return SlotRuns(np.array(begins, np.int32), np.array(lengths, np.int32))

    def place(self, row: int, begin: int, pages: Int32Array) -> None:
        """Gives an empty row pages (int32 [n]) from page index `begin` on."""
        self.pages[row, begin : begin + pages.size] = pages
        self.begins[row], self.ends[row] = begin, begin + pages.size

    def reset(self, row: int) -> None:
        self.begins[row] = self.ends[row] = self.budgets[row] = 0

    def held(self, row: int, begin: int = 0, end: int | None = None) -> Int32Array:
        """Copies the ids of the pages that a row holds among page indexes begin … end - 1; end None: all."""
        first, last = max(begin, int(self.begins[row])), int(self.ends[row])
        return self.pages[row, first : last if end is None else min(end, last)].copy()

    def take_out(self, rows: Int64Array, begins: Int64Array, ends: Int64Array) -> Int32Array:
        """Takes page indexes begins[i] … ends[i] - 1 away from rows[i] (distinct; all int64 [n]), as far as it holds
        them; later ones move up."""
        first, held = self.begins[rows], self.ends[rows]
        begins, ends = np.minimum(begins, held), np.minimum(ends, held)
        gone = self.held_between(rows, np.clip(first, begins, ends), ends)
        self.put(rows, begins, held - ends, self.held_between(rows, ends, held))
        self.begins[rows] = first - (np.clip(first, begins, ends) - begins)
        self.ends[rows] = begins + held - ends
        return gone

    def held_between(self, rows: Int64Array, begins: Int64Array, ends: Int64Array) -> Int32Array:
        """The page ids at page indexes begins[i] … ends[i] - 1 of rows[i], one row after another; all int64 [B]."""
        return self.pages[ragged_pairs(rows, begins, ends - begins)]

    def put(self, rows: Int64Array, begins: Int64Array, counts: Int64Array, pages: Int32Array) -> None:
        """Hands pages (int32 [sum of counts]) to rows: counts[i] of them to rows[i], from page index begins[i] on."""
        self.pages[ragged_pairs(rows, begins, counts)] = pages
