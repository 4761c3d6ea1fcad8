"""Sequences that are sent to another worker: with the forwards that compute them, or afterwards."""

import numpy as np

from tandem.cache.operations.open_trees import OpenTrees
from tandem.cache.operations.send_plan import Sends, plan_sends
from tandem.cache.operations.store import Store
from tandem.cache.pages.send_marks import Sent
from tandem.cache.pages.sequence_table import Standing
from tandem.cache.plan.arrays import Int64Array, integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.page_writer import PageWriter
from tandem.cache.plan.position_map import PositionMap
from tandem.cache.plan.tables import TokenLayout, lay_out_tokens


class Transmissions:
    """The sending end of a transfer; calls as PagedKVCache has them."""

    def __init__(self, store: Store, trees: OpenTrees, writer: PageWriter | None) -> None:
        self._table, self._marks, self._sliding = store.table, store.marks, store.sliding
        self._groups, self._layout = store.groups, store.layout
        self._trees = trees
        self._writer = writer
        self._launched: Standing | None = None  # of the last forward
        self.nothing: tuple[Sends, Sent | None] = [()] * len(store.groups), None

    def plan(self, rows: Int64Array, tokens: TokenLayout) -> tuple[Sends, Sent | None]:
        """What a forward sends that has grown rows (int64 [B]) by `tokens`; see plan_sends."""
        return plan_sends(self._marks, self._table, rows, tokens, self._layout.page_size)

    def commit(self, sent: Sent | None, standing: Standing | None) -> None:
        """A forward of these rows was launched, and so was what it sends; None: it took no note of its layers."""
        if sent is not None:
            self._marks.commit(sent)
        self._launched = standing

    def send_cached(self, sequence: int) -> None:
        row = self._table.row(sequence)
        rows, last = np.array([row]), self._launched
        is_whole = self._table.lengths[row] >= self._marks.ends[row]  # else it can go beside the next forward
        staged = bool(is_whole) and last is not None and last.holds and row in last.rows
        sends, sent = self.plan(rows, lay_out_tokens(self._table.lengths[rows], np.zeros(1, np.int64)))
        for group, to_send in zip(self._groups, sends, strict=True):
            group.push_cached(to_send, staged=staged)
        self._marks.commit(sent)

    def bytes_sent(self, sequence: int) -> int:
        counts, layout = self._marks.num_slots_sent(self._table.row(sequence)), self._layout
        return sum(n * layout.page_bytes(group) // layout.page_size for group, n in enumerate(counts))

    def mark(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> None:
        row = self._table.row(sequence)
        self._trees.check_closed(sequence)
        if self._writer is None:
            raise InvalidArgument(f"sequence {sequence} cannot be sent: the cache was made without a writer")
        if begin != position_map.start_position:
            raise InvalidArgument(f"begin is {begin}; the position map starts at {position_map.start_position}")
        integer("target_pe", target_pe)
        for group, runs in zip(range(len(self._groups)), position_map.runs, strict=False):
            peer_pool = self._writer.peer_pool(target_pe, group)  # it refuses a PE that is not there
            if peer_pool is not None and runs.end > peer_pool.shape[0] * self._layout.page_size:  # else writes check it
                raise InvalidArgument(
                    f"the position map has slot {runs.end - 1} for layer group {group}; the pool of PE {target_pe} "
                    f"ends at {peer_pool.shape[0] * self._layout.page_size - 1}"
                )
        held = [int(group.begins[row]) * self._layout.page_size for group in self._table.groups]
        self._sliding.check_map(row, position_map)
        self._marks.add(sequence, row, position_map, target_pe, held)
