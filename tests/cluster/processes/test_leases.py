"""Leases between the launcher and processes on other hosts."""

from concurrent.futures import Future
from itertools import product
from typing import Any

import pytest

from tandem.cluster.errors import ProcessEnded
from tandem.cluster.processes.leases import HeldLease, Lease, Leases
from tests.support.waiting import until


def done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future


def test_a_lease_counts_from_the_renewal_before_the_last() -> None:
    """The last one may have been under way for a while, the one before was answered when it was sent."""
    now = 0.0
    lease = Lease(10.0, lambda: now)
    now = 4.0
    lease.renew()  # ends at 10
    now = 6.0
    lease.renew()  # ends at 14
    now = 13.9
    assert not lease.is_over()
    now = 14.0
    assert lease.is_over()


def test_a_renewal_that_comes_late_does_not_bring_a_lease_back() -> None:
    now = 0.0
    lease = Lease(10.0, lambda: now)
    now = 10.0
    assert lease.is_over()
    lease.renew()
    lease.renew()
    assert lease.is_over()
    lease.wait()


@pytest.mark.parametrize(("there", "back"), [*product((0.0, 0.4, 3.0, 9.0), repeat=2)])
def test_a_lease_ends_before_the_launchers_patience(there: float, back: float) -> None:
    """Renewals and answers may be under way for any time, and the link may break at any moment."""
    now, lease_seconds = 0.0, 10.0
    for broken in range(60):
        now = 0.0
        lease = Lease(lease_seconds, lambda: now)  # noqa: B023  # read at once
        silent_since = 0.0
        while now + there < broken and not lease.is_over():
            now += there
            lease.renew()
            if now + back >= broken:
                break
            now += back + 0.1
            silent_since = now
        now = silent_since + lease_seconds
        assert lease.is_over()


def test_silence_is_counted_from_the_last_answer() -> None:
    there: Future[None] = Future()
    answers: list[Future[Any]] = []

    def renew() -> Future[Any]:
        answers.append(Future())
        return answers[-1]

    lease = HeldLease(there, renew)
    lease.tick(1.0)
    assert not answers  # it still imports
    there.set_result(None)
    lease.tick(1.0)
    lease.tick(0.5)
    assert (lease.silent_seconds, len(answers)) == (0.5, 1)
    answers[0].set_result(None)
    lease.tick(0.5)
    assert (lease.silent_seconds, len(answers)) == (0.0, 2)
    answers[1].set_exception(ProcessEnded("p", "its host cannot be reached"))
    lease.tick(0.5)
    assert (lease.silent_seconds, len(answers)) == (0.5, 3)


def test_leases_are_renewed_until_they_are_dropped() -> None:
    renewed = [0, 0]

    def renewing(number: int) -> HeldLease:
        def renew() -> Future[Any]:
            renewed[number] += 1
            return done()

        return HeldLease(done(), renew)

    leases, held = Leases(1.0, 3.0), [renewing(0), renewing(1)]
    for lease in held:
        leases.hold(lease)
    until(lambda: min(renewed) > 1)
    leases.drop(held[0])
    leases.drop(held[0])
    before = renewed[1]
    until(lambda: renewed[1] > before)
    rest = renewed[0]
    until(lambda: renewed[1] > before + 2)
    assert renewed[0] <= rest + 1
    leases.close()
