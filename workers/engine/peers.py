"""Where a worker stands among those that it writes to."""

from typing import NamedTuple

from tandem.cache.plan.layout import KVLayout


class Peers(NamedTuple):
    """pe: its own number, of num_pes. num_pages: of each layer group, alike on all PEs. num_signals: rows of a mailbox
    for reservations. layouts: what each PE's position maps are of."""

    pe: int
    num_pes: int
    epoch: int
    num_pages: tuple[int, ...]
    num_signals: int
    layouts: tuple[KVLayout, ...]
