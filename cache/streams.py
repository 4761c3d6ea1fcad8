"""Sequences with a sliding window in a forward: evicting before it, undoing that when it cannot be, planning it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from tandem.cache.errors import CacheError, InvalidArgument
from tandem.cache.page_pools import PageIds
from tandem.cache.plan import TokenLayout, slots_of
from tandem.cache.position_map import SKIP, Int32Array, PositionMap
from tandem.cache.rope import Rotation
from tandem.cache.rotations import Rotations
from tandem.cache.sequence_table import SequenceTable
from tandem.cache.stream_attention import StreamPart, unrotated
from tandem.cache.stream_table import Slide
from tandem.cache.window import Int64Array


@dataclass(frozen=True, eq=False)
class _Before:
    """A row as it was."""

    row: int
    length: int
    hole: int
    dropped: int
    pages: PageIds


class Streams:
    """What makes rows of `table` slide; see StreamTable for how they are stored."""

    def __init__(self, table: SequenceTable, rotations: Rotations, page_size: int) -> None:
        self._table = table
        self._rotations = rotations
        self._page_size = page_size

    def check_window(self, window: int, sink: int, max_length: int) -> None:
        most = max_length - 2 * self._page_size + 2
        if not 1 <= window <= most:
            raise InvalidArgument(f"window is {window}; 1 … {most} are accepted")
        if not 0 <= sink < window:
            raise InvalidArgument(f"sink is {sink}; 0 … {window - 1}, less than the window, are accepted")
        if self._rotations.by_length:
            raise InvalidArgument(
                "RoPE is dynamic or longrope, by the length of a sequence; those with a sliding window need another"
            )

    @contextmanager
    def slid(self, rows: Int64Array, appends: Int64Array, *, receive: bool = False) -> Iterator[PageIds]:
        """Evicts what rows (distinct) let go of before `appends` more; undone when the caller's block raises.

        Yields per group the pages that are gone, for the caller to release.
        """
        if self._table.streams.count == 0:
            yield tuple(np.empty(0, np.int32) for _ in self._table.groups)
            return
        before, gone = [], []
        for index in np.flatnonzero(self._table.streams.windows[rows]):
            row = int(rows[index])
            slide = self._table.streams.plan_slide(
                row, int(self._table.lengths[row]), int(appends[index]), receive=receive
            )
            if slide is not None:
                before.append(self._keep(row))
                gone.append(self._apply(row, slide))
        try:
            yield tuple(
                np.concatenate([np.empty(0, np.int32), *(ids[group] for ids in gone)])
                for group in range(len(self._table.groups))
            )
        except CacheError:
            for kept in before:
                self._restore(kept)
            raise

    def plan(
        self, rows: Int64Array, tokens: TokenLayout, rotations: list[Rotation | None]
    ) -> tuple[list[Rotation | None], list[tuple[StreamPart, ...]]]:
        """Per group the rotation, with what streams append left as it is, and the streams' parts."""
        table = self._table
        sliding = np.flatnonzero(table.streams.windows[rows]) if table.streams.count else np.empty(0, np.int64)
        if sliding.size == 0:
            return rotations, [()] * len(table.groups)
        of_streams = torch.from_numpy(np.isin(tokens.owners, sliding))
        left = [None if r is None else unrotated(r, of_streams.to(r.cos.device)) for r in rotations]
        stored = [table.streams.indices(int(rows[index]), int(tokens.seq_lens[index])) for index in sliding]
        places = self._rotations.of_places(max(indices.size for indices in stored))
        parts = [
            tuple(
                StreamPart(
                    int(tokens.qo_indptr[index]),
                    int(tokens.qo_indptr[index + 1]),
                    slots_of(group.pages[int(rows[index])], indices, self._page_size),
                    None if of_group is None else of_group.first(indices.size),
                )
                for index, indices in zip(sliding, stored, strict=True)
            )
            for group, of_group in zip(table.groups, places, strict=True)
        ]
        return left, parts

    def indices(self, row: int, begin: int, end: int) -> Int64Array:
        """int64: where a row stores positions begin … end - 1, which it has."""
        streams = self._table.streams
        found = streams.find(row, begin, end)
        if (found < 0).any():
            raise InvalidArgument(
                f"begin and end are {begin} and {end}; positions {int(streams.sinks[row])} … "
                f"{int(streams.dropped[row] + streams.sinks[row] + streams.holes[row]) - 1} have left the window"
            )
        return found

    def check_cut(self, row: int, length: int) -> None:
        """InvalidArgument unless a row can be cut to `length` indices: no further than what it has not evicted."""
        streams = self._table.streams
        least = int(streams.sinks[row] + streams.holes[row])
        if int(streams.holes[row] + streams.dropped[row]) and length < least:
            most = int(self._table.lengths[row]) - least
            raise InvalidArgument(f"only the last {most} positions are there; what was before has left the window")

    def check_map(self, row: int, position_map: PositionMap) -> None:
        """InvalidArgument when a map asks for what the row has evicted, or does before the map's end is reached."""
        streams = self._table.streams
        window, sink = int(streams.windows[row]), int(streams.sinks[row])
        cached = int(self._table.lengths[row] + streams.dropped[row])
        begin, end = position_map.start_position, position_map.end_position
        if window == 0 or begin >= cached:
            return
        positions = np.arange(begin, min(end, cached))
        lost = streams.find(row, begin, min(end, cached)) < 0
        lost |= (positions >= sink) & (positions < end - (window - sink))
        for runs in position_map.runs:
            wanted = positions[lost & (runs.slots()[: positions.size] != SKIP)]
            if wanted.size:
                raise InvalidArgument(
                    f"the position map asks for position {int(wanted[0])}, which does not stay in the sliding window "
                    f"of {window} until position {end} is reached; the receiver must slide alike"
                )

    def _keep(self, row: int) -> _Before:
        streams = self._table.streams
        return _Before(
            row,
            int(self._table.lengths[row]),
            int(streams.holes[row]),
            int(streams.dropped[row]),
            self._table.held_pages(row),
        )

    def _apply(self, row: int, slide: Slide) -> tuple[Int32Array, ...]:
        streams = self._table.streams
        gone = tuple(group.take_out(row, slide.first, slide.end) for group in self._table.groups)
        self._table.lengths[row], streams.holes[row], streams.dropped[row] = slide.length, slide.hole, slide.dropped
        return gone

    def _restore(self, before: _Before) -> None:
        streams, row = self._table.streams, before.row
        self._table.lengths[row], streams.holes[row], streams.dropped[row] = before.length, before.hole, before.dropped
        for group, ids in zip(self._table.groups, before.pages, strict=True):
            group.pages[row, : ids.size] = ids
            group.ends[row] = ids.size
