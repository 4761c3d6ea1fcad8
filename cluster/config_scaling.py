"""The section of a cluster's configuration that says what changes its islands by itself."""

from typing import Self

from pydantic import Field, model_validator

from tandem.cluster.config_units import Islands, Seconds, Section


class ScalingSection(Section):
    """The policy changes the number of islands where a target is given and max_islands is above min_islands."""

    min_islands: Islands = Field(default=1, le=256)
    """fewest islands that the scaling policy keeps"""
    max_islands: Islands | None = Field(default=None, le=256)
    """most islands that the scaling policy or `tandem scale --islands` may ask for; null is num_islands, at least 64"""
    queue_seconds: Seconds | None = Field(default=None, gt=0, le=3600)
    """target: longest that requests should wait for room; more islands start where they wait longer; null is none"""
    first_token_seconds: Seconds | None = Field(default=None, gt=0, le=80)
    """target: nine first tokens in ten should come within so long; null is none"""
    token_seconds: Seconds | None = Field(default=None, gt=0, le=10)
    """target: nine gaps in ten between tokens should be at most so long; null is none"""
    up_after_seconds: Seconds = Field(default=30.0, ge=1, le=3600)
    """how long a target must be missed before islands start; figures are those of the last so many seconds"""
    down_after_seconds: Seconds = Field(default=300.0, ge=1, le=86400)
    """how long fewer islands must have been enough before islands end"""
    cooldown_seconds: Seconds = Field(default=60.0, ge=0, le=86400)
    """how long the policy leaves things as they are behind a change of the number of islands, its own or another"""

    @property
    def targets(self) -> dict[str, float]:
        """Those that are given, by their keys."""
        values = {name: getattr(self, name) for name in ("queue_seconds", "first_token_seconds", "token_seconds")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def is_automatic(self) -> bool:
        """Whether the policy acts."""
        return bool(self.targets) and self.max_islands is not None and self.max_islands > self.min_islands

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if self.max_islands is not None and self.max_islands < self.min_islands:
            raise ValueError(f"must have min_islands, here {self.min_islands}, of at most max_islands")
        if self.targets and self.max_islands is None:
            raise ValueError(f"must have max_islands where {' or '.join(self.targets)} is set")
        return self
