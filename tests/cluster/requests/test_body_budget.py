"""Tests how many bytes of requests may be under way."""

import pytest

from tandem.cluster.errors import Overloaded
from tandem.cluster.requests.body_budget import SMALL_BODY, BodyBudget, largest_body

MIB = 1 << 20


@pytest.mark.parametrize(
    ("configured", "context", "mib"),
    [(None, 256, 4), (None, 1 << 17, 4), (None, 200_000, 7), (None, 1 << 24, 16), (1, 1 << 17, 1), (64, 256, 64)],
)
def test_the_largest_body_goes_by_the_context(configured: int | None, context: int, mib: int) -> None:
    assert largest_body(configured, context) == mib * MIB


def test_what_is_over_the_budget_is_refused_until_something_is_released() -> None:
    budget = BodyBudget(4 * MIB, MIB)
    held = [budget.open(host) for host in "aabb"]
    for body in held:
        body.hold(MIB)
    late = budget.open("c")
    with pytest.raises(
        Overloaded, match=r"requests of 5 MiB are being received; at most 4 MiB are allowed \(gateway.max_bod"
    ):
        late.hold(MIB)
    held[0].release()
    held[0].release()
    late.hold(MIB)
    assert budget.held == 4 * MIB
    for body in [*held, late]:
        body.release()
    assert budget.held == 0


def test_one_host_has_half() -> None:
    budget = BodyBudget(4 * MIB, MIB)
    first, second = budget.open("a"), budget.open("a")
    first.hold(MIB)
    with pytest.raises(
        Overloaded, match="requests of 3 MiB are being received from this host; at most 2 MiB are allowed"
    ):
        second.hold(2 * MIB)
    assert budget.held == MIB
    budget.open("b").hold(2 * MIB)


def test_the_largest_body_has_room_and_small_ones_do_not_count() -> None:
    budget = BodyBudget(MIB, 16 * MIB)
    budget.open("a").hold(16 * MIB)
    small = budget.open("a")
    small.hold(SMALL_BODY)
    assert budget.held == 16 * MIB
