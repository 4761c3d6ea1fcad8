"""Numbers that order the calls of one request id over all gateway processes of all hosts."""

import time

from tandem.cluster.peers.table import Column, GatewayTable


class ClaimClock:
    """A hybrid logical clock: Lamport's, which begins at the time of day (Kulkarni et al., 2014).

    A new number is higher than all numbers that this process has given or seen, or another process of its host. So a
    call that begins after this host has heard of another one has the higher number, whatever the hosts' clocks say. The
    time of day orders calls of hosts that did not hear of each other. Owned by the gateway's event loop.
    """

    def __init__(self, table: GatewayTable) -> None:
        self._table = table

    def next(self) -> int:
        """Returns the number of a new call. Two processes may draw the same one: Claim.origin decides then."""
        number = max(self._table.highest(Column.CLOCK) + 1, time.time_ns())
        self._table.put(Column.CLOCK, number)
        return number

    def see(self, number: int) -> None:
        """Takes a number that another process has given."""
        if number > self._table.own(Column.CLOCK):
            self._table.put(Column.CLOCK, number)
