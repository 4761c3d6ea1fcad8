"""A thread that keeps one part of the cluster running."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn

from tandem.cluster.config.sections import RecoverySection
from tandem.cluster.errors import NoRoom, ProcessEnded, RayLost, ReshapeFailed, StartFailed, TandemError, WorkerLost
from tandem.cluster.supervision.stop_signal import Stopping, StopSignal

JOIN_SECONDS = 120.0
RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 10.0  # if no host has room: a host may come back
log = logging.getLogger(__name__)


class RestartBudget:
    """Allows at most max_restarts in any window_seconds."""

    def __init__(self, max_restarts: int, window_seconds: float) -> None:
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._times: deque[float] = deque()
        self.used = 0  # in all

    def take(self, now: float) -> bool:
        """Returns whether one more restart is allowed at `now`, a monotonic time in seconds, and counts it."""
        while self._times and self._times[0] <= now - self._window_seconds:
            self._times.popleft()
        if len(self._times) >= self._max_restarts:
            return False
        self._times.append(now)
        self.used += 1
        return True


class Supervisor(ABC):
    """A thread that owns one part's processes: it starts them, watches them, and starts them again after a loss.

    ready ends when the part first serves, or with the error of its start. When the budget of restarts is used up,
    `failed` gets WorkerLost, once, from this thread. A part without room on any host waits for room.
    """

    def __init__(self, name: str, recovery: RecoverySection, failed: Callable[[TandemError], None]) -> None:
        self.ready: Future[None] = Future()
        self._name = name
        self._recovery = recovery
        self._failed = failed
        self._stop = StopSignal()
        self._budget = RestartBudget(recovery.max_restarts, recovery.window_seconds)
        self._join_seconds = JOIN_SECONDS
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begins the gentle end of the processes, and does not wait for it."""
        self._stop.call_off()

    def join(self) -> None:
        """Returns when the thread and its processes have ended."""
        if self._thread.ident is not None:
            self._thread.join(self._join_seconds)

    @property
    def is_alive(self) -> bool:
        """True if the thread still runs."""
        return self._thread.is_alive()

    @abstractmethod
    def _begin(self) -> None:
        """Starts the processes and returns when they serve. Raises a TandemError when they do not."""

    @abstractmethod
    def _watch(self) -> NoReturn:
        """Raises ProcessEnded when a process is lost, ReshapeFailed when the part does not serve any more."""
        raise NotImplementedError

    @abstractmethod
    def _clear(self, lost: TandemError) -> None:
        """Cleans up after a loss: handles what the lost processes leave, and ends processes that cannot go on without
        them."""

    @abstractmethod
    def _end(self) -> None:
        """Ends the processes gently."""

    def _run(self) -> None:
        try:
            self._begin()
            self.ready.set_result(None)
            while True:
                try:
                    self._watch()
                except (ProcessEnded, ReshapeFailed) as lost:
                    self._restart(lost)
        except Stopping:
            pass
        except Exception as error:
            known = error if isinstance(error, TandemError) else StartFailed(f"{type(error).__name__}: {error}")
            if self.ready.done():
                self._failed(known)
            else:
                self.ready.set_exception(known)
        finally:
            self._end()

    def _restart(self, lost: TandemError) -> None:
        pause = RETRY_SECONDS
        while True:
            log.warning("%s is started again: %s", self._name, lost)
            self._clear(lost)
            if not isinstance(lost, NoRoom) and not self._budget.take(time.monotonic()):
                recovery = self._recovery
                raise WorkerLost(
                    f"{self._name}: {lost}; it may be started again {recovery.max_restarts} times in "
                    f"{recovery.window_seconds:g} s (recovery.max_restarts, recovery.window_seconds)"
                )
            try:
                self._begin()
                return
            except RayLost:
                raise  # nothing could start it again
            except TandemError as error:
                lost = error
                self._stop.wait_any((), pause)  # resources of the lost processes may not be free yet
                pause = min(2 * pause, LONGEST_RETRY_SECONDS) if isinstance(error, NoRoom) else RETRY_SECONDS
