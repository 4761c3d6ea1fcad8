"""Makes forwards and sends wait for copies between the pools and the store of evicted pages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.cache.pages.page_pools import PagePools
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.arrays import Int32Array, Int64Array, ragged_pairs
from tandem.cache.plan.layout import KVLayout
from tandem.cache.plan.tables import StateWrites, TokenLayout
from tandem.cache.store.copies import Arrivals


@dataclass(eq=False)
class CopyFences:
    """Sequences hold pages that are on their way up, and write into pages that are on their way down."""

    layout: KVLayout
    table: SequenceTable
    pools: PagePools

    def before(
        self, rows: Int64Array, tokens: TokenLayout, kept: Sequence[StateWrites] = (), *, by_layers: bool
    ) -> Arrivals | None:
        """Orders a forward that has grown rows (int64 [B]) by `tokens` after copies. It writes pages and snapshots
        `kept` after copies of them, and reads other pages after theirs.

        by_layers: where the rows' pages are on their way up, the forward itself waits, for each layer by what this
        returns. Not in layouts with states or an encoder, and not where sequences slide.
        """
        copies = self.pools.copies
        if not copies.pending:
            return None
        for group, pages in enumerate(self._written(rows, tokens)):
            copies.wait_for(group, pages)
        for group, writes in enumerate(kept):
            copies.wait_for(group, writes.pages.astype(np.int32))
        newest = int(self.table.arriving[rows].max(initial=0))
        slides = self.table.sliding.count > 0 and bool(self.table.sliding.windows[rows].any())
        if by_layers and not (self.layout.recurs or self.layout.has_encoder or slides):
            return copies.arrivals(newest)
        copies.wait_until(newest)
        return None

    def all_of(self, row: int) -> None:
        """Makes work launched from now on wait for the copies into a row's pages."""
        if self.pools.copies.pending:
            self.pools.copies.wait_until(int(self.table.arriving[row]))

    def is_whole(self, row: int) -> bool:
        """Whether all pages of a row have come up."""
        return self.pools.copies.is_past(int(self.table.arriving[row]))

    def arrive(self, row: int) -> None:
        """Notes that a row has got pages that may still be copied up."""
        copies = self.pools.copies
        if copies.pending:
            pages = enumerate(self.table.held_pages(row))
            self.table.arriving[row] = max(copies.newest(group, ids) for group, ids in pages)

    def _written(self, rows: Int64Array, tokens: TokenLayout) -> list[Int32Array]:
        """Returns for each layer group the pages of rows that their new tokens write."""
        ends = tokens.seq_lens.astype(np.int64)
        begins, written = ends - np.diff(tokens.qo_indptr), []
        for group in self.table.groups:
            every, reach = group.paging.every, group.paging.reach
            first = np.maximum(begins // every // reach, group.begins[rows])
            last = np.minimum(-(-(ends // every) // reach), group.ends[rows])
            written.append(group.pages[ragged_pairs(rows, first, np.maximum(last - first, 0))])
        return written
