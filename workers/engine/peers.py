"""Where a worker stands among those that it writes to."""

from typing import NamedTuple

from tandem.cache.plan.layout import KVLayout


class Peers(NamedTuple):
    """pe: its own number, of num_pes. epoch: its own. num_pages: of each layer group, alike on all PEs. num_signals:
    rows of a mailbox for reservations. layouts: what each PE's position maps are of. epochs: of each PE, 0 where nobody
    has its place."""

    pe: int
    num_pes: int
    epoch: int
    num_pages: tuple[int, ...]
    num_signals: int
    layouts: tuple[KVLayout, ...]
    epochs: tuple[int, ...]

    def with_epoch(self, pe: int, epoch: int) -> "Peers":
        """Once a peer has gone, or another process has its place."""
        return self._replace(epochs=(*self.epochs[:pe], epoch, *self.epochs[pe + 1 :]))
