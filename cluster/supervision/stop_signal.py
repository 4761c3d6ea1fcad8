"""A signal that ends a thread's wait for processes."""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any


class Stopping(Exception):
    """The wait was called off: its cluster is being stopped."""


class StopSignal:
    """A signal that is given once, from any thread. All waits through it then raise Stopping."""

    def __init__(self) -> None:
        self._set: Future[None] = Future()

    def call_off(self) -> None:
        if not self._set.done():
            self._set.set_result(None)

    def wait_any(self, calls: Sequence[Future[Any]], seconds: float) -> set[Future[Any]]:
        """Returns the ended ones of `calls`, as soon as there is one or `seconds` have passed."""
        done, _ = wait([*calls, self._set], timeout=seconds, return_when=FIRST_COMPLETED)
        if self._set.done():
            raise Stopping
        return done

    def results(self, calls: Sequence[Future[Any]], seconds: float) -> list[Any]:
        """Returns all results, or raises at once the exception of a call that fails. TimeoutError after `seconds`."""
        deadline = time.monotonic() + seconds
        pending = set(calls)
        while pending:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no answer within {seconds:g} s")
            done = self.wait_any(list(pending), left)
            for call in done:
                call.result()
            pending -= done
        return [call.result() for call in calls]

    def answers(self, calls: Sequence[Future[Any]], seconds: float) -> list[Any]:
        """Returns the results of calls that succeed within `seconds`; others are left out."""
        deadline, pending = time.monotonic() + seconds, set(calls)
        while pending and (left := deadline - time.monotonic()) > 0:
            pending -= self.wait_any(list(pending), left)
        return [call.result() for call in calls if call not in pending and call.exception() is None]
