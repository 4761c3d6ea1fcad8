"""Which pages the sequences of a cache hold: growing, sharing, copying before a write."""

import numpy as np

from tandem.cache.kernels.base import Kernels
from tandem.cache.page_pools import PageIds, PagePools
from tandem.cache.sequence_table import Int64Array, SequenceTable


class SequencePages:
    """Moves pages between `pools` and the rows of `table`, and keeps this true of every row:

        places:  0 …                      lengths // page_size         num_pages
                 [ full, may be shared ]  [ partial, may be shared ]  [ reserved, its own ]

    Nothing is ever written into a shared page, so only a partial one can be in the way; it is copied before it grows.
    """

    def __init__(self, table: SequenceTable, pools: PagePools, kernels: tuple[Kernels, ...], page_size: int) -> None:
        self._table = table
        self._pools = pools
        self._kernels = kernels
        self._page_size = page_size

    def grow(self, rows: Int64Array, lengths: Int64Array, new_lengths: Int64Array) -> None:
        """Gives rows of `lengths` the pages for new_lengths, writable from `lengths` on; OutOfPages changes nothing.

        All int64 [B]; rows are distinct.
        """
        table, size = self._table, self._page_size
        last_places = (new_lengths - 1) // size
        tail_places = lengths // size
        needed = np.maximum(last_places + 1 - table.num_pages[rows], 0)
        partial = np.flatnonzero(tail_places * size != lengths)
        shared = partial[self._pools.are_shared(table.pages[0][rows[partial], tail_places[partial]])]
        added = int(needed.sum())
        if added + shared.size:
            pages = self._pools.allocate(added + shared.size)
            self._replace(rows[shared], tail_places[shared], tuple(ids[added:] for ids in pages))
            table.append_pages(rows, needed, tuple(ids[:added] for ids in pages))
        # What stands past a sequence's end in its last page is read, though masked: a new last page is cleared.
        opened = np.flatnonzero(last_places * size >= lengths)
        if opened.size:
            for kernels, of_group in zip(self._kernels, table.pages, strict=True):
                kernels.clear_pages(of_group[rows[opened], last_places[opened]])
        table.lengths[rows] = new_lengths

    def own(self, row: int, length: int, num_pages: int) -> None:
        """Makes places length // page_size … num_pages - 1 pages of the row's own; OutOfPages changes nothing."""
        table = self._table
        begin, held = length // self._page_size, int(table.num_pages[row])
        shared = begin + np.flatnonzero(self._pools.are_shared(table.pages[0][row, begin : min(held, num_pages)]))
        added = max(num_pages - held, 0)
        pages = self._pools.allocate(added + shared.size)
        self._replace(np.full(shared.size, row), shared, tuple(ids[added:] for ids in pages))
        table.append_pages(np.array([row]), np.array([added]), tuple(ids[:added] for ids in pages))

    def cut(self, row: int, length: int) -> None:
        """Shortens a row to `length`; its reserved places stay, and become its own. OutOfPages changes nothing."""
        table, reserved = self._table, int(self._table.reserved_pages[row])
        self.own(row, length, reserved)
        kept = max(-(-length // self._page_size), reserved)
        self._pools.release(table.held_pages(row, kept))
        table.num_pages[row] = kept
        table.lengths[row] = length

    def fork(self, parent: int, child: int, length: int) -> None:
        """Gives the empty row `child` the first `length` positions of row `parent`; OutOfPages changes nothing."""
        full, rest = divmod(length, self._page_size)
        copies = self._pools.allocate(1 if rest else 0)
        self.share(child, self._table.held_pages(parent, 0, full))
        if rest:
            self._copy(self._table.held_pages(parent, full, full + 1), copies)
            self._table.append_pages(np.array([child]), np.array([1]), copies)
        self._table.lengths[child] = length

    def share(self, row: int, pages: PageIds) -> None:
        """Gives an empty row full pages that others hold."""
        self._pools.retain(pages)
        count = pages[0].size
        self._table.append_pages(np.array([row]), np.array([count]), pages)
        self._table.lengths[row] = count * self._page_size

    def _replace(self, rows: Int64Array, places: Int64Array, pages: PageIds) -> None:
        """Puts copies in the stead of shared pages: `pages` at `places` of `rows`."""
        if rows.size == 0:
            return
        old = tuple(of_group[rows, places] for of_group in self._table.pages)
        self._copy(old, pages)
        for of_group, ids in zip(self._table.pages, pages, strict=True):
            of_group[rows, places] = ids
        self._pools.release(old)

    def _copy(self, sources: PageIds, targets: PageIds) -> None:
        for kernels, source, target in zip(self._kernels, sources, targets, strict=True):
            kernels.copy_pages(source, target)
