"""Calls that come too late for their reservation, and reservations that are too many."""

from pathlib import Path

import pytest

from tandem.workers.errors import InvalidCall, NoRoom, StaleReservation
from tests.support.oracle import random_prompt
from tests.workers.loop_pair import LoopPair

MOST = 16  # LoopPair's max_sequences
PROMPT, OTHER = random_prompt(37, 0), random_prompt(37, 1)


def test_a_late_start_does_not_begin_a_later_reservation_of_its_id(pair: LoopPair) -> None:
    """Its stream would get the tokens of a request that another call waits for."""
    first = pair.prepare("a", PROMPT)
    pair.decode.abort("a", writer_quiet=True)
    second = pair.prepare("a", OTHER)
    assert second.reservation_id != first.reservation_id
    with pytest.raises(StaleReservation, match=f"reservation {first.reservation_id} of request 'a' is not held here"):
        pair.start("a", first)
    assert pair.decode_counters.stale_calls == 1
    alone = pair.complete("b", OTHER)
    assert pair.finish("a", OTHER, second) == alone
    pair.assert_free()


def test_an_id_whose_pages_drain_is_not_reserved_again(pair: LoopPair) -> None:
    """The gateway's word that its writer is quiet would free the pages of the other one, too."""
    pair.prepare("a", PROMPT)
    pair.decode.abort("a", writer_quiet=False)
    with pytest.raises(InvalidCall, match="request 'a' was aborted"):
        pair.prepare("a", OTHER)
    pair.heed_recalls()
    pair.assert_free()


def test_what_drains_counts_among_the_most_sequences(folder: Path) -> None:
    """The cache keeps their pages, and graphs and arrays are made for so many."""
    pair = LoopPair(folder, num_pages=64, num_signals=32)
    for number in range(MOST):
        pair.prepare(str(number), random_prompt(5, number))
    pair.decode.abort("0", writer_quiet=False)
    with pytest.raises(NoRoom, match=f"all {MOST} sequences of this worker are taken"):
        pair.prepare("more", PROMPT)
    pair.heed_recalls()
    pair.prepare("more", PROMPT)
