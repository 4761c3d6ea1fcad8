"""How often something may be started again before one gives up."""

from collections import deque


class RestartBudget:
    """At most max_restarts in any window_seconds."""

    def __init__(self, max_restarts: int, window_seconds: float) -> None:
        self._max_restarts = max_restarts
        self._window_seconds = window_seconds
        self._times: deque[float] = deque()
        self.used = 0  # in all

    def take(self, now: float) -> bool:
        """Whether there may be one more restart at `now`, a monotonic time in seconds; it is then counted."""
        while self._times and self._times[0] <= now - self._window_seconds:
            self._times.popleft()
        if len(self._times) >= self._max_restarts:
            return False
        self._times.append(now)
        self.used += 1
        return True
