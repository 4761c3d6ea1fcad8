"""Chooses how many islands a cluster should have: numbers in, a number out. Starts and ends nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tandem.cluster.config.scaling import ScalingSection
from tandem.cluster.supervision.autoscaling.sizing import Pressure, Sizing


@dataclass(frozen=True)
class Load:
    """The recent load that the gateway has seen. None: too few requests came to tell."""

    queue_seconds: float = 0.0  # how long a request that came now would wait for room; 0 if none waits
    first_token_seconds: float | None = None
    token_seconds: float | None = None
    tokens_per_second: float = 0.0  # of prompts and outputs, as far as they were served
    output_tokens_per_second: float = 0.0  # of outputs alone
    placements_per_second: float = 0.0


@dataclass(frozen=True)
class Decision:
    """The number of islands that the cluster should have. why: in words, empty if nothing changes."""

    islands: int
    why: str = ""


class ScalingPolicy:
    """Sizes islands by the worst of all targets, with Sizing.

    It never asks for less than min_islands or more than max_islands. Without max_islands it asks for no change. Not for
    several threads.
    """

    def __init__(self, section: ScalingSection, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, monotonic."""
        self._section = section
        self._sizing = Sizing(section, clock)

    def changed(self) -> None:
        """Reports a change to the Sizing."""
        self._sizing.changed()

    def desired(self, load: Load, islands: int) -> Decision:
        """Returns the wanted number. Called every second or so. islands: the present number."""
        if self._section.max_islands is None:
            return Decision(islands)
        least, most = self._section.min_islands, self._section.max_islands
        ratio, worst = self._worst(load)
        pressure = Pressure(ratio, worst, load.tokens_per_second, bool(load.queue_seconds))
        wanted = self._sizing.desired(pressure, islands, least, most)
        if wanted == islands:
            return Decision(islands)
        if not least <= islands <= most:
            return Decision(wanted, f"scaling.min_islands is {least}")
        calm = f"fewer have been enough for {self._sizing.calm_seconds:.0f} s"
        return Decision(wanted, worst if wanted > islands else calm)

    def _worst(self, load: Load) -> tuple[float, str]:
        """Returns the largest part of a target that is used up, and the target in words. Above 1 the target is
        missed."""
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
