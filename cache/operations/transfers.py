"""The transfer face of a cache: both ends of a transfer from a worker's pages to another's."""

from tandem.cache.operations.parts import Parts
from tandem.cache.plan.arrays import integer
from tandem.cache.plan.errors import InvalidArgument
from tandem.cache.plan.position_map import PositionMap


class TransferCalls(Parts):
    """prepare_receive at the receiver → mark_send at the sender → forwards, or send_cached → finish_receive."""

    def prepare_receive(self, sequence: int, length: int) -> PositionMap:
        """Grows a sequence by length ≥ 1 positions that a remote writer will fill; where each of them goes.

        Positions in pages that no later query sees, by the groups' windows, are skipped. Until finish_receive the pages
        stay out of use whatever happens to the sequence, and it may only be removed.
        """
        row = self._settled_row(sequence)
        integer("length", length, least=1)
        if self.layout.drops_past and self._marks.any_open(row):  # what it is to send may leave a window
            raise InvalidArgument(f"sequence {sequence} is marked to be sent; with windows it receives only afterwards")
        if self._table.sliding.windows[row] == 0:  # a sliding sequence has room for any number
            self._growth.check_length(sequence, int(self._table.lengths[row]) + length)
        return self._receptions.begin(sequence, length)

    def finish_receive(self, sequence: int) -> None:
        """The writer is quiet: no write into the sequence's pages can come any more. Idempotent."""
        self._receptions.finish(sequence)

    def mark_send(self, sequence: int, begin: int, position_map: PositionMap, target_pe: int) -> None:
        """Positions `begin` (where the map starts) … end of the map go to target_pe while they are computed, cached
        ones page to page with the next forward or send_cached(). InvalidArgument when the map asks for some that have
        left a window here; a forward that would let go of some not yet sent is refused."""
        self._transmissions.mark(sequence, begin, position_map, target_pe)

    def send_cached(self, sequence: int) -> None:
        """What a marked sequence has and did not send goes page to page, once what was launched so far stored it."""
        self._receptions.check_settled(sequence)
        self._transmissions.send_cached(sequence)

    def num_sent(self, sequence: int) -> int:
        """Positions of its map that forwards have issued; less again after pop."""
        return self._marks.num_sent(self._table.row(sequence))

    def bytes_sent(self, sequence: int) -> int:
        """Bytes of those, without what the map skips."""
        return self._transmissions.bytes_sent(sequence)

    def sends_done(self, sequence: int) -> bool:
        """Whether all of its map has been issued; True without one."""
        return not self._marks.any_open(self._table.row(sequence))
