"""Sequences that a remote writer fills, and the pages that stay out of use until it is quiet."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tandem.cache.attention.sliding_sequences import SlidingSequences
from tandem.cache.pages.page_pools import PageIds, PagePools
from tandem.cache.pages.sequence_pages import SequencePages
from tandem.cache.pages.sequence_table import SequenceTable
from tandem.cache.plan.arrays import Int64Array
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import SKIP, PositionMap, SlotRuns
from tandem.cache.plan.tables import slots_of


@dataclass(eq=False)
class Receptions:
    """The receptions in progress, by sequence. A sequence may be removed before its reception ends. Then its pages
    drain.

    A remote write is not ordered with this process's streams. Work queued earlier that runs later would overwrite it.
    So the end of the last page is not cleared when the writer learns of the page, but in order with the first forward
    that reads it.
    """

    table: SequenceTable
    pages: SequencePages
    pools: PagePools
    sliding: SlidingSequences
    memory: Sequence[Tensor]
    """For each layer group the pages, [num_pages, …, page_size, elements]."""
    incoming: dict[int, PageIds] = field(default_factory=dict)
    """For each sequence the pages that its writer may write into."""

    def begin(self, sequence: int, length: int) -> PositionMap:
        """Grows a sequence by `length` ≥ 1 positions, and returns their slots. OutOfPages changes nothing."""
        table = self.table
        row = table.row(sequence)
        begin = table.num_positions(row)
        if begin + length < table.border(row):
            raise InvalidArgument(
                f"length is {length}; an encoder's positions come whole, so it must be at least "
                f"{table.border(row) - begin}"
            )
        rows = np.array([row])
        with self.sliding.slid(rows, np.array([length]), receive=True) as gone:
            stored = int(table.lengths[row])  # a sequence that slid holds its positions at lower indices now
            end = begin + length - int(table.sliding.dropped[row])
            ends = np.array([end])
            self.pages.grow(rows, table.lengths[rows], ends, queries=ends, gone=gone, clear=False)
        spans = ((group, group.paging) for group in table.groups)
        pages = tuple(
            group.held(row, min(stored, end) // paging.positions, paging.num_pages(end)) for group, paging in spans
        )
        self.pools.hold(pages)
        self.incoming[sequence] = pages
        table.receiving[row], table.unclean[row] = True, self._ends_in_pages(end)
        device = self.memory[0].device
        shared = (group.paging.ends_in_page(stored) for group in table.groups)
        if device.type == "cuda" and any(shared):  # a copy of a partial page, or of a snapshot, may be queued
            torch.cuda.current_stream(device).synchronize()
        runs, every = self._runs(row, begin, begin + length), tuple(group.every for group in table.groups)
        return PositionMap(begin, runs, table.sliding.sliding(row), every)

    def clear_ends(self, rows: Int64Array, lengths: Int64Array) -> None:
        """Clears what stands past `lengths` (int64 [B]) in the last pages of rows that have not been cleared yet, on
        the current stream."""
        unclean = self.table.unclean[rows].nonzero()[0]
        if unclean.size == 0:
            return
        self.table.unclean[rows] = False
        for row, length in zip(rows[unclean].tolist(), lengths[unclean].tolist(), strict=True):
            for group, pool in zip(self.table.groups, self.memory, strict=True):
                page_index, offset = divmod(group.paging.num_entries(length), group.page_size)
                if offset and not group.paging.whole and group.begins[row] <= page_index < group.ends[row]:
                    pool[int(group.pages[row, page_index]), ..., offset:, :].zero_()

    def _runs(self, row: int, begin: int, end: int) -> tuple[SlotRuns, ...]:
        groups, size = self.table.groups, self.table.page_size
        if self.table.sliding.windows[row] == 0:
            return tuple(group.runs(row, begin, end) for group in groups)
        indices = self.table.sliding.find(row, begin, end)
        positions, runs = np.arange(begin, end), []
        for group, first in zip(groups, self.pages.first_positions(row), strict=True):
            slots = slots_of(group.pages, row, np.maximum(indices, 0), size)
            runs.append(SlotRuns.from_slots(np.where((indices >= 0) & (positions >= first), slots, SKIP)))
        return tuple(runs)

    def _ends_in_pages(self, length: int) -> bool:
        """Whether `length` positions use a part of a page, in some group."""
        return any(group.paging.ends_in_page(length) for group in self.table.groups if not group.paging.whole)

    def finish(self, sequence: int) -> None:
        """Ends a reception, once the writer is quiet. Idempotent."""
        pages = self.incoming.pop(sequence, None)
        if pages is None:
            return
        self.pools.settle(pages)
        if sequence in self.table:
            self.table.receiving[self.table.row(sequence)] = False

    def check_settled(self, sequence: int) -> None:
        """InvalidArgument while the sequence is being received."""
        if self.table.receiving[self.table.row(sequence)]:
            raise InvalidArgument(f"sequence {sequence} is being received; finish_receive ends that")
