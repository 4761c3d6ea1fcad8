"""The loss of a cluster's Ray, as processes that await answers learn of it."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from threading import Lock
from typing import Any

from tandem.cluster.errors import ProcessEnded, RayAway, RayLost


class Loss:
    """A loss is declared once, from any thread. All awaited answers then fail with ProcessEnded, and so do later ones.

    Between interrupt() and resume() processes live on, but none can be placed, and no place can be given back.
    """

    def __init__(self) -> None:
        self.reason = ""  # empty until it is declared
        self._away = ""
        self._final_at = 0.0  # when a start that still waits fails
        self._later: list[Callable[[], None]] = []
        self._lock = Lock()
        self._awaited: dict[Future[Any], str] = {}

    def declare(self, reason: str) -> None:
        with self._lock:
            self.reason = self.reason or reason
            awaited = list(self._awaited.items())
        for answer, name in awaited:
            _fail(answer, name, reason)

    def interrupt(self, reason: str, patience_seconds: float) -> None:
        """Makes check() raise RayAway from now on, and RayLost after so many seconds without resume()."""
        with self._lock:
            self._away, self._final_at = reason, time.monotonic() + patience_seconds

    def resume(self) -> None:
        """Ends the interruption, and does the work that was left for later."""
        with self._lock:
            self._away, acts, self._later = "", self._later, []
        for act in acts:
            act()

    def when_there(self, act: Callable[[], None]) -> None:
        """Calls act() now, or with resume(). Never after a loss."""
        with self._lock:
            if self._away:
                self._later.append(act)
                return
        act()

    @property
    def is_away(self) -> bool:
        """True between interrupt() and resume()."""
        return bool(self._away)

    def check(self) -> None:
        """Checks that processes can be placed. Raises RayLost after a loss, else the errors of interrupt()."""
        if self.reason:
            raise RayLost(self.reason)
        with self._lock:
            away, is_final = self._away, time.monotonic() >= self._final_at
        if away:
            raise RayLost(away) if is_final else RayAway(away)

    def awaited(self, answer: Future[Any], name: str) -> None:
        """Fails the answer of the process `name` on a loss, unless it has come."""
        with self._lock:
            self._awaited[answer] = name
        answer.add_done_callback(self._forget)
        if self.reason:
            _fail(answer, name, self.reason)

    def results(self, calls: Sequence[Future[Any]], name: str, seconds: float) -> list[Any]:
        """Returns the results of all calls. Raises the error of a call, ProcessEnded on a loss, or TimeoutError after
        `seconds`."""
        lost: Future[None] = Future()
        self.awaited(lost, name)
        try:
            pending = set(calls)
            while pending and not lost.done():
                more, _ = wait([*pending, lost], timeout=seconds, return_when=FIRST_COMPLETED)
                if not more:
                    raise TimeoutError(f"no answer within {seconds:g} s")
                pending -= more
            if pending:
                lost.result()
            return [call.result() for call in calls]
        finally:
            with suppress(InvalidStateError):
                lost.set_result(None)

    def _forget(self, answer: Future[Any]) -> None:
        with self._lock:
            self._awaited.pop(answer, None)


def _fail(answer: Future[Any], name: str, reason: str) -> None:
    with suppress(InvalidStateError):  # it has just come
        answer.set_exception(ProcessEnded(name, reason))
