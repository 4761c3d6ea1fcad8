"""Limits how often something may happen."""


class Allowance:
    """`rate` a second in the long run, `burst` at once. Times are the caller's, in seconds."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate
        self._burst = burst
        self._left = burst
        self._since = 0.0

    def spend(self, count: int, now: float) -> float:
        """Seconds until it is no longer overdrawn: 0 where so many were allowed."""
        self._left = min(self._burst, self._left + (now - self._since) * self._rate) - count
        self._since = now
        return max(0.0, -self._left / self._rate)
