"""The transfer face of a cache: both ends of a transfer from a worker's pages to another's."""

from dataclasses import replace

import numpy as np

from tandem.cache.operations.parts import Parts
from tandem.cache.operations.send_plan import plan_sends
from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import PositionMap
from tandem.cache.plan.spans import NO_WINDOW
from tandem.cache.plan.tables import lay_out_tokens


class TransferCalls(Parts):
    """prepare_receive at the receiver → mark_send at the sender → forwards, or send_cached → finish_receive."""

    def prepare_receive(self, sequence: int, length: int, *, rotated: bool = False) -> PositionMap:
        """Grows a sequence by length ≥ 1 positions that a remote writer will fill. Returns their slots.

        Positions in pages that no later query sees, by the groups' windows, are skipped. Until finish_receive the pages
        stay out of use whatever happens to the sequence, and it may only be removed.

        rotated: the writer's sequence does not slide, so its K is rotated, but this one slides. As many positions must
        have been rotated before. Else the writer's sequence must slide in the same way.
        """
        row = self._settled_row(sequence)
        integer("length", length, least=1)
        if self.layout.drops_past and self._marks.any_open(row):  # what it is to send may leave a window
            raise InvalidArgument(f"sequence {sequence} is marked to be sent; with windows it receives only afterwards")
        sliding = self._table.sliding.sliding(row)
        if sliding is None or sliding.window == NO_WINDOW:  # a sliding sequence has room for any number
            self._table.check_length(sequence, int(self._table.lengths[row]) + length)
        if sliding is None or not rotated:
            return self._receptions.begin(sequence, length)
        end = self._table.num_positions(row) + length
        if sliding.rotated != end - length:
            raise InvalidArgument(
                f"rotated is true, but of sequence {sequence} only {sliding.rotated} of {end - length} positions are "
                "rotated; all that it holds must be"
            )
        self._sliding.check_rotated(sliding.window, sliding.sink, end)
        received = self._receptions.begin(sequence, length)
        self._table.sliding.rotated[row] = end
        return replace(received, sliding=sliding._replace(rotated=end))

    def finish_receive(self, sequence: int) -> None:
        """The writer is quiet: no write into the sequence's pages can come any more. Idempotent."""
        self._receptions.finish(sequence)

    def mark_send(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> None:
        """Positions `begin` (where the map starts) … end of the map go to target_pe while they are computed, cached
        ones page to page with the next forward or send_cached(). InvalidArgument when the map asks for some that have
        left a window here; a forward that would drop some not yet sent is refused."""
        row = self._table.row(sequence)
        self._trees.check_closed(sequence)
        if self._writer is None:
            raise InvalidArgument(f"sequence {sequence} cannot be sent: the cache was made without a writer")
        if begin != position_map.start_position:
            raise InvalidArgument(f"begin is {begin}; the position map starts at {position_map.start_position}")
        integer("target_pe", target_pe)
        if self.layout.recurs and (length := int(self._table.lengths[row])) > position_map.end_position:
            raise InvalidArgument(
                f"the position map ends at {position_map.end_position}, but sequence {sequence} has the state after "
                f"{length} positions; the map must end there or later"
            )
        for group, runs in zip(range(len(self._groups)), position_map.runs, strict=False):
            peer_pool = self._writer.peer_pool(target_pe, group)  # it refuses a PE that is not there
            num_slots = 0 if peer_pool is None else peer_pool.shape[0] * self.layout.paging[group].entries
            if peer_pool is not None and runs.end > num_slots:  # else writes check it
                raise InvalidArgument(
                    f"the position map has slot {runs.end - 1} for layer group {group}; the pool of PE {target_pe} "
                    f"ends at {num_slots - 1}"
                )
        self._sliding.check_map(row, position_map)
        self._marks.add(sequence, row, position_map, target_pe, self._pages.first_positions(row))

    def send_cached(self, sequence: int) -> None:
        """Sends page to page what a marked sequence has and did not send, once the work launched so far has stored
        it."""
        self._receptions.check_settled(sequence)
        row = self._table.row(sequence)
        rows, last = np.array([row]), self._launched
        is_whole = self._table.lengths[row] >= self._marks.ends[row]  # else it can go during the next forward
        staged = bool(is_whole) and last is not None and last.holds and row in last.rows
        tokens = lay_out_tokens(self._table.lengths[rows], np.zeros(1, np.int64))
        sends, sent = plan_sends(self._marks, self._table, rows, tokens)
        self._fences.all_of(row)
        for group, to_send in zip(self._groups, sends, strict=True):
            group.push_cached(to_send, staged=staged)
        self._marks.commit(sent)
