"""Leases of processes on other hosts. A lease that is not renewed ends its process, so a host that is cut off goes
quiet.

    launcher                                          process host on another host
    every few hundred ms: renew() ────────────────►   the lease ends `lease_seconds` after the renewal before this one
                          ◄────────────────────────   heard
    silent for longer than the lease: cut off         over: it kills its process, then itself

A renewal is sent when the one before was answered, so no earlier than the process host heard the one before. From that
moment the lease counts. So however late messages come, the lease ends before the launcher's patience does. Both sides
measure by their monotonic clocks.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

RENEWALS = 10  # in the time for which a link may be down
LEAST_SECONDS = 0.1


class Lease:
    """The process host's side of a lease. is_over never becomes false again, once it was seen."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._heard = clock()
        self._ends = self._heard + seconds
        self._over = False

    def renew(self) -> None:
        with self._lock:
            self._ends = max(self._ends, self._heard + self._seconds)
            self._heard = self._clock()

    def is_over(self) -> bool:
        with self._lock:
            self._over = self._over or self._clock() >= self._ends
            return self._over

    def wait(self) -> None:
        """Returns once the lease is over."""
        while not self.is_over():
            with self._lock:
                left = self._ends - self._clock()
            time.sleep(max(0.0, left))


class HeldLease:
    """The launcher's side of a lease. silent_seconds: how long the process host has not answered a renewal.

    Time in which this process was itself stopped does not count.
    """

    def __init__(self, there: Future[Any], renew: Callable[[], Future[Any]]) -> None:
        """there: done once the process host can answer. renew: sends one renewal."""
        self.silent_seconds = 0.0
        self._there = there
        self._renew = renew
        self._answer: Future[Any] | None = None

    def tick(self, seconds: float) -> None:
        """Counts `seconds`, the time since the last tick."""
        if not self._there.done():
            return
        answer = self._answer
        if answer is not None and not (answer.done() and answer.exception() is None):
            self.silent_seconds += seconds
        else:
            self.silent_seconds = 0.0
        if answer is None or answer.done():
            self._answer = self._renew()


class Leases:
    """A thread that renews leases, until close(). Other calls of the processes, and their duration, do not matter to
    it."""

    def __init__(self, partition_seconds: float, seconds: float) -> None:
        """partition_seconds: how long a link may be down. seconds: of each lease."""
        self.seconds = seconds
        self._pause = max(LEAST_SECONDS, partition_seconds / RENEWALS)
        self._lock = threading.Lock()
        self._held: set[HeldLease] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, lease: HeldLease) -> None:
        with self._lock:
            self._held.add(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
                self._thread.start()

    def drop(self, lease: HeldLease) -> None:
        """Lets the lease run out. Idempotent."""
        with self._lock:
            self._held.discard(lease)

    def close(self) -> None:
        """Lets all leases run out. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        ticked = time.monotonic()
        while not self._closed.wait(self._pause):
            now = time.monotonic()
            with self._lock:
                held = list(self._held)
            for lease in held:
                lease.tick(min(now - ticked, 2 * self._pause))
            ticked = now
