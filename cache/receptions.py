"""Sequences that a remote writer fills, and the pages that stay out of use until it is quiet."""

import numpy as np

from tandem.cache.errors import InvalidArgument
from tandem.cache.page_pools import PageIds, PagePools
from tandem.cache.plan import runs_of
from tandem.cache.position_map import PositionMap
from tandem.cache.sequence_pages import SequencePages
from tandem.cache.sequence_table import SequenceTable


class Receptions:
    """Who is being received, by sequence: a sequence may be removed meanwhile, and its pages drain."""

    def __init__(self, table: SequenceTable, pages: SequencePages, pools: PagePools, page_size: int) -> None:
        self._table = table
        self._pages = pages
        self._pools = pools
        self._page_size = page_size
        self._incoming: dict[int, PageIds] = {}

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._incoming

    def __len__(self) -> int:
        return len(self._incoming)

    def begin(self, sequence: int, length: int) -> PositionMap:
        """Grows a sequence by `length` ≥ 1 positions; where each of them goes. OutOfPages changes nothing."""
        table, size = self._table, self._page_size
        row = table.row(sequence)
        begin = int(table.lengths[row])
        end = begin + length
        self._pages.grow(np.array([row]), np.array([begin]), np.array([end]), queries=np.array([end]))
        pages = table.held_pages(row, begin // size, -(-end // size))
        self._pools.hold(pages)
        self._incoming[sequence] = pages
        table.receiving[row] = True
        runs = (runs_of(group.pages[row], begin, end, size, int(group.begins[row])) for group in table.groups)
        return PositionMap(begin, tuple(runs))

    def finish(self, sequence: int) -> None:
        """The writer is quiet. Idempotent."""
        pages = self._incoming.pop(sequence, None)
        if pages is None:
            return
        self._pools.settle(pages)
        if sequence in self._table:
            self._table.receiving[self._table.row(sequence)] = False

    def check_settled(self, sequence: int) -> None:
        """InvalidArgument while the sequence is being received."""
        if self._table.receiving[self._table.row(sequence)]:
            raise InvalidArgument(f"sequence {sequence} is being received; finish_receive ends that")
