"""How long work continues while no call waits for it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

WRITER_FRACTION = 0.8  # of the receiver's lease: the writer stops before it is over

Clock = Callable[[], float]
"""Seconds that only go forward, as time.monotonic."""


@dataclass(eq=False)
class Lease:
    """Runs out `seconds` after the last call that waited for the work has gone, and not while one waits.

    It bounds how long pages are kept and prompts are computed for a gateway that died. No lease makes a page free: that
    takes the writer's word, whatever clocks say.
    """

    seconds: float
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._calls = 0
        self._ends = self.clock() + self.seconds

    def attend(self) -> None:
        """Stops the lease, because a call waits from now on."""
        self._calls += 1

    def leave(self) -> None:
        """Notes that a call which waited has gone."""
        self._calls -= 1
        self._ends = self.clock() + self.seconds

    @property
    def seconds_left(self) -> float | None:
        """None while a call waits; 0 when the lease is over."""
        return None if self._calls else max(0.0, self._ends - self.clock())

    @property
    def is_over(self) -> bool:
        return self.seconds_left == 0
