"""How many islands a cluster should have: numbers in, a number out. Starts and ends nothing."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.cluster.config_scaling import ScalingSection

COMFORT = 0.8  # of every target: what figures must be below before an island ends
HEADROOM = 0.75  # of what an island can do: what the islands that stay may get to do
SURPRISE = 1.25  # times what an island could do: so much done in comfort says that the work is another one
MOST_GROWTH = 2.0


@dataclass(frozen=True)
class Load:
    """What the gateway has seen of late. None: too little came to say."""

    queue_seconds: float = 0.0  # how long a request that came now would wait for room; 0 where none waits
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    tokens_per_second: float = 0.0  # of prompts and outputs, as far as they were served


@dataclass(frozen=True)
class Decision:
    """How many islands there should be. why: in words, empty where all may stay as it is."""

    islands: int
    why: str = ""


class ScalingPolicy:
    """Grows when a target has been missed for up_after_seconds, and shrinks when fewer islands would have met all of
    them for down_after_seconds. Between the two lies what an island can do, which each overload shows: tokens a second.

    Growth is by the worst target: as many times more islands as it is missed by, at least one and at most MOST_GROWTH
    times as many. Shrinking leaves as many as do the highest rate of that time with HEADROOM. Where no overload has
    shown what an island can do, one island ends at a time. It never asks for less than min_islands or more than
    max_islands. Not for several threads.
    """

    def __init__(self, section: ScalingSection, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: in seconds, never going back."""
        self._section = section
        self._clock = clock
        self._capacity: float | None = None  # tokens a second of an island, when it last missed a target
        self._missed_since: float | None = None
        self._calm_since: float | None = None
        self._peak = 0.0  # tokens a second, since it is calm
        self._hold_until = -math.inf

    def changed(self) -> None:
        """The number of islands has changed or is changing, by whatever order: what was seen before counts no more."""
        self._missed_since = self._calm_since = None
        self._hold_until = self._clock() + self._section.cooldown_seconds

    def desired(self, load: Load, islands: int) -> Decision:
        """Called every second or so. islands: that there are."""
        least, most = self._section.min_islands, self._section.max_islands or islands
        now = self._clock()
        ratio, worst = self._worst(load)
        if ratio > 1:
            self._calm_since = None
            self._missed_since = now if self._missed_since is None else self._missed_since
            if now - self._missed_since >= self._section.up_after_seconds:
                self._capacity = load.tokens_per_second / islands
                if now >= self._hold_until and islands < most:
                    wanted = max(islands + 1, math.ceil(islands * min(MOST_GROWTH, ratio)))
                    return Decision(min(most, max(least, wanted)), worst)
        else:
            self._missed_since = None
            if self._capacity is not None and load.tokens_per_second > SURPRISE * self._capacity * islands:
                self._capacity = None
            fewer = self._fewer(load, ratio, islands, now)
            if fewer < islands and now >= self._hold_until:
                return Decision(
                    max(least, fewer), f"fewer have been enough for {now - (self._calm_since or now):.0f} s"
                )
        if not least <= islands <= most and now >= self._hold_until:
            return Decision(min(most, max(least, islands)), f"scaling.min_islands is {least}")
        return Decision(islands)

    def _worst(self, load: Load) -> tuple[float, str]:
        """The largest part of a target that is used up, and it in words. Above 1 the target is missed."""
        waits = load.queue_seconds or None
        first = [value for value in (load.first_token_seconds, waits) if value is not None]  # who waits has none yet
        figures = {
            "queue_seconds": (waits, "requests wait for room"),
            "first_token_seconds": (max(first, default=None), "first tokens take"),
            "token_seconds": (load.token_seconds, "tokens take"),
        }
        ratio, words = 0.0, ""
        for name, target in self._section.targets.items():
            value, about = figures[name]
            if value is not None and value / target > ratio:
                ratio, words = value / target, f"{about} {value:.3g} s; scaling.{name} is {target:g}"
        return ratio, words

    def _fewer(self, load: Load, ratio: float, islands: int, now: float) -> int:
        """How many would do, once that is sure; before, as many as there are."""
        if self._calm_since is None:
            self._peak = 0.0
        self._peak = max(self._peak, load.tokens_per_second)
        enough = self._enough(islands)
        if ratio > COMFORT or load.queue_seconds or enough >= islands or islands <= self._section.min_islands:
            self._calm_since = None
            return islands
        self._calm_since = now if self._calm_since is None else self._calm_since
        return enough if now - self._calm_since >= self._section.down_after_seconds else islands

    def _enough(self, islands: int) -> int:
        if not self._peak:
            return self._section.min_islands
        if self._capacity is None:
            return islands - 1
        return max(1, math.ceil(self._peak / (HEADROOM * self._capacity))) if self._capacity else islands
