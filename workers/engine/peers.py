"""A worker's place among the peers that it writes to."""

from typing import NamedTuple

from tandem.cache.plan.layout import KVLayout
from tandem.transfer.recall import num_request_rows
from tandem.transfer.transport import Transport


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

    @classmethod
    def of(cls, transport: Transport) -> "Peers":
        """Makes the peers of a transport that has joined."""
        where = transport.pe, transport.num_pes, transport.epoch
        epochs = transport.config.all_epochs
        return cls(*where, transport.num_pages, num_request_rows(transport), transport.layouts, epochs)

    def with_epoch(self, pe: int, epoch: int) -> "Peers":
        """Returns the peers once one has gone, or another process has its place."""
        return self._replace(epochs=(*self.epochs[:pe], epoch, *self.epochs[pe + 1 :]))
