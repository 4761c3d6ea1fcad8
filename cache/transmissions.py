"""Sequences that are sent to another worker: with the forwards that compute them, or afterwards."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from tandem.cache.cached_send import CachedSend
from tandem.cache.errors import InvalidArgument
from tandem.cache.group_attention import GroupForward
from tandem.cache.integers import integer
from tandem.cache.layout import KVLayout
from tandem.cache.open_trees import OpenTrees
from tandem.cache.page_writer import PageWriter
from tandem.cache.plan import lay_out_tokens
from tandem.cache.position_map import PositionMap
from tandem.cache.send_marks import SendMarks
from tandem.cache.send_plan import plan_sends
from tandem.cache.sequence_table import SequenceTable
from tandem.cache.streams import Streams


class Transmissions:
    """The sending end of a transfer; calls as PagedKVCache has them."""

    def __init__(
        self,
        table: SequenceTable,
        marks: SendMarks,
        streams: Streams,
        trees: OpenTrees,
        groups: Sequence[GroupForward],
        writer: PageWriter | None,
        layout: KVLayout,
    ) -> None:
        self._table = table
        self._marks = marks
        self._streams = streams
        self._trees = trees
        self._groups = groups
        self._writer = writer
        self._layout = layout

    def mark(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> None:
        length = self._length(sequence)
        if position_map.end_position <= length:
            raise InvalidArgument(
                f"the position map ends at {position_map.end_position}; it must reach further than the {length} "
                f"positions of sequence {sequence} that are cached"
            )
        self._mark(sequence, begin, position_map, target_pe)

    def send_cached(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> CachedSend:
        length = self._length(sequence)
        if position_map.end_position > length:
            raise InvalidArgument(
                f"the position map ends at {position_map.end_position}; sequence {sequence} has {length} positions"
            )
        self._mark(sequence, begin, position_map, target_pe)
        rows = np.array([self._table.row(sequence)])
        nothing = lay_out_tokens(self._table.lengths[rows], np.zeros(1, np.int64))
        sends, sent = plan_sends(self._marks, self._table, rows, nothing, self._layout.page_size)
        assert sent is not None  # no map is empty
        return CachedSend(self._groups, self._layout, sends, partial(self._marks.commit, sent))

    def bytes_sent(self, sequence: int) -> int:
        counts, layout = self._marks.num_slots_sent(self._table.row(sequence)), self._layout
        return sum(n * layout.page_bytes(group) // layout.page_size for group, n in enumerate(counts))

    def _length(self, sequence: int) -> int:
        return self._table.num_positions(self._table.row(sequence))

    def _mark(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> None:
        row = self._table.row(sequence)
        self._trees.check_closed(sequence)
        if self._writer is None:
            raise InvalidArgument(f"sequence {sequence} cannot be sent: the cache was made without a writer")
        if begin != position_map.start_position:
            raise InvalidArgument(f"begin is {begin}; the position map starts at {position_map.start_position}")
        self._writer.peer_pool(integer("target_pe", target_pe), 0)  # it refuses a PE that is not there
        held = [int(group.begins[row]) * self._layout.page_size for group in self._table.groups]
        self._streams.check_map(row, position_map)
        self._marks.add(sequence, row, position_map, target_pe, held)
