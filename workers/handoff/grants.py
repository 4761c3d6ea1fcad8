"""Grants this worker each reservation once, and none that was recalled."""

import math

from tandem.cache.plan.position_map import PositionMap
from tandem.transfer.completion import Signal, is_newer
from tandem.transfer.recall import Recall
from tandem.transfer.wire_map import decode_map
from tandem.workers.counters import Counters
from tandem.workers.engine.engine import Engine
from tandem.workers.errors import InvalidCall, StaleEpoch, StaleReservation
from tandem.workers.wire.reservation import Reservation


class Grants:
    """Remembers, for every signal slot of a receiver, the last use that was granted or recalled.

    So a call that comes late or twice is refused, even where the pages have another owner by now. Owned by the step
    thread.
    """

    def __init__(self, engine: Engine, counters: Counters) -> None:
        self._engine = engine
        self._counters = counters
        self._latest: dict[tuple[int, int], int] = {}  # (receiver, slot) → generation

    def check(self, reservation: Reservation, num_tokens: int, border: int = 0) -> PositionMap:
        """Returns the map by which the KV of a prompt of num_tokens is written. border: see decode_map. Raises
        StaleEpoch, StaleReservation, InvalidCall or InvalidPositionMap unless this worker may write for the
        reservation."""
        peers = self._engine.peers
        for name, limit in (("target_pe", peers.num_pes), ("signal_slot", peers.num_signals)):
            value = getattr(reservation, name)
            if value >= limit:
                raise InvalidCall(f"{name} is {value}; it must be from 0 to {limit - 1}")
        target_pe, epoch = reservation.target_pe, reservation.epoch
        if epoch != peers.epochs[target_pe]:
            self._counters.stale_calls += 1
            raise StaleEpoch(epoch, peers.epochs[target_pe], target_pe)
        if (reservation.writer_epoch or epoch) != peers.epoch:
            self._counters.stale_calls += 1
            raise StaleEpoch(reservation.writer_epoch or epoch, peers.epoch)
        if reservation.writer_pe != peers.pe:
            raise InvalidCall(f"writer_pe is {reservation.writer_pe}; this worker is PE {peers.pe}")
        if not 0 < reservation.lease_seconds < math.inf:
            raise InvalidCall(f"lease_seconds is {reservation.lease_seconds}; it must be above 0 and finite")
        if reservation.wire_map is None:
            raise InvalidCall("position_map is not set; a worker that writes to itself begins with StartGenerate")
        latest = self._latest.get((reservation.target_pe, reservation.signal_slot))
        if latest is not None and not is_newer(reservation.generation, latest):
            self._counters.stale_calls += 1
            raise StaleReservation(
                f"generation is {reservation.generation}; slot {reservation.signal_slot} of PE "
                f"{reservation.target_pe} is at {latest} here: the reservation was used or recalled"
            )
        if not reservation.matched_tokens < num_tokens:
            raise InvalidCall(
                f"matched_tokens is {reservation.matched_tokens} of a prompt of {num_tokens}; one must be left"
            )
        position_map = decode_map(
            reservation.wire_map,
            self._engine.layout,
            num_pages=peers.num_pages,
            expected_start=reservation.matched_tokens,
            expected_tokens=num_tokens - reservation.matched_tokens,
            receiver=peers.layouts[reservation.target_pe],
            border=border,
        )
        if not reservation.authentic:  # comes last: what the other checks can say is more to the point
            raise InvalidCall("reservation.seal does not fit: it is not as a decode worker of this island made it")
        return position_map

    def take(self, reservation: Reservation) -> None:
        """Marks the reservation as used. The caller has called check() before."""
        self._latest[reservation.target_pe, reservation.signal_slot] = reservation.generation

    def forget(self, pe: int) -> None:
        """Forgets a receiver that has gone. The uses of its rows count from the beginning."""
        self._latest = {row: generation for row, generation in self._latest.items() if row[0] != pe}

    def recalled(self) -> list[Recall]:
        """Recalls to be answered; check() refuses those reservations from now on."""
        recalls = self._engine.recalls_asked()
        for recall in recalls:
            row, generation = (recall.pe, recall.signal.row), recall.signal.generation
            if row not in self._latest or is_newer(generation, self._latest[row]):
                self._latest[row] = generation
        return recalls

    def answer(self, recall: Recall) -> None:
        """Lets the receiver have its pages back. All that was written there for that reservation must be quiet."""
        self._engine.answer(recall)
        self._counters.recalled += 1


def signal_of(reservation: Reservation) -> Signal:
    return Signal(reservation.signal_slot, reservation.generation)
