"""Chooses how many members of a kind are enough for their load: figures in, a number out. Starts and ends nothing."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.cluster.config.scaling import ScalingSection

COMFORT = 0.8  # of every target: figures must be below before a member ends
HEADROOM = 0.75  # of a member's capacity: the most that remaining members may get
SURPRISE = 1.25  # times a member's capacity: so much done without stress means that the work has changed
MOST_GROWTH = 2.0


@dataclass(frozen=True)
class Pressure:
    """The load of a kind's members, and how well they bear it.

    ratio: the largest part of a target that is used up; above 1 the target is missed. why: that in words. rate: tokens
    a second that they do. waits: whether a request waits for a member. at_least: the fewest members that could hold the
    present load.
    """

    ratio: float
    why: str
    rate: float
    waits: bool = False
    at_least: int = 0


class Sizing:
    """Wants more members when a target has been missed for up_after_seconds, and fewer when fewer would have met all
    targets for down_after_seconds. The capacity of a member, in tokens a second, connects the two. Each overload shows
    it.

    The worst target decides growth: the number grows by the factor by which that target is missed, by at least one
    member and at most MOST_GROWTH times. After shrinking, the remaining members can do the highest rate of that time
    with HEADROOM. Before any overload has shown the capacity, one member ends at a time. Not for several threads.
    """

    def __init__(self, section: ScalingSection, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._section = section
        self._clock = clock
        self._capacity: float | None = None  # tokens a second of a member, when a target was last missed
        self._missed_since: float | None = None
        self._calm_since: float | None = None
        self._peak = 0.0  # tokens a second, since it is calm
        self._hold_until = -math.inf

    def changed(self) -> None:
        """Records that the number has changed or is changing, by whatever order. Earlier figures no longer count."""
        self._missed_since = self._calm_since = None
        self._hold_until = self._clock() + self._section.cooldown_seconds

    @property
    def holds(self) -> bool:
        """True if the last change is too recent for another one."""
        return self._clock() < self._hold_until

    @property
    def calm_seconds(self) -> float:
        """The seconds for which fewer members have been enough."""
        return 0.0 if self._calm_since is None else self._clock() - self._calm_since

    def desired(self, pressure: Pressure, count: int, least: int, most: int) -> int:
        """Returns the wanted number, least … most. Called every second or so, with the present number."""
        now = self._clock()
        if pressure.ratio > 1:
            self._calm_since = None
            self._missed_since = now if self._missed_since is None else self._missed_since
            if now - self._missed_since >= self._section.up_after_seconds:
                self._capacity = pressure.rate / count
                if not self.holds and count < most:
                    wanted = max(count + 1, math.ceil(count * min(MOST_GROWTH, pressure.ratio)))
                    return min(most, max(least, wanted))
        else:
            self._missed_since = None
            if self._capacity is not None and pressure.rate > SURPRISE * self._capacity * count:
                self._capacity = None
            fewer = self._fewer(pressure, count, least)
            if fewer < count and not self.holds:
                return max(least, fewer)
        return count if self.holds else min(most, max(least, count))

    def _fewer(self, pressure: Pressure, count: int, least: int) -> int:
        """Returns the smaller number that is enough, once that is sure; before, `count`."""
        if self._calm_since is None:
            self._peak = 0.0
        self._peak = max(self._peak, pressure.rate)
        enough = max(self._enough(count, least), pressure.at_least)
        if pressure.ratio > COMFORT or pressure.waits or enough >= count or count <= least:
            self._calm_since = None
            return count
        self._calm_since = self._clock() if self._calm_since is None else self._calm_since
        return enough if self.calm_seconds >= self._section.down_after_seconds else count

    def _enough(self, count: int, least: int) -> int:
        if not self._peak:
            return least
        if self._capacity is None:
            return count - 1
        return max(1, math.ceil(self._peak / (HEADROOM * self._capacity))) if self._capacity else count
