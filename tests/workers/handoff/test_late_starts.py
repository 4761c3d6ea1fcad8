"""Calls of StartGenerate that come too late for their reservation."""

import pytest

from tandem.workers.errors import StaleReservation
from tests.support.oracle import random_prompt
from tests.workers.loop_pair import LoopPair

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
