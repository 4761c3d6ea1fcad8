"""The section of a cluster's configuration for the scaling policy."""

from typing import Self

from pydantic import Field, model_validator

from tandem.cluster.config.units import Islands, Seconds, Section, Workers


class ScalingSection(Section):
    """The scaling policy. With a target it changes the number of islands if max_islands is above min_islands, and the
    workers of each island if max_workers is set."""

    min_islands: Islands = Field(default=1, le=256)
    """fewest islands that the scaling policy keeps"""
    max_islands: Islands | None = Field(default=None, le=256)
    """most islands for the scaling policy and `tandem scale --islands`; null is num_islands, but at least 64"""
    max_workers: Workers | None = Field(default=None, ge=2, le=512)
    """most workers of an island, whose roles then follow the load; null leaves islands' shapes alone"""
    min_prefill: Workers = Field(default=1, le=256)
    """fewest prefill workers that the policy leaves an island, with max_workers"""
    min_decode: Workers = Field(default=1, le=256)
    """fewest decode workers that the policy leaves an island, with max_workers"""
    queue_seconds: Seconds | None = Field(default=None, gt=0, le=3600)
    """target for the wait for room; more islands start if requests wait longer; null sets no target"""
    first_token_seconds: Seconds | None = Field(default=None, gt=0, le=80)
    """target for the 90th percentile of times to the first token; null sets no target"""
    token_seconds: Seconds | None = Field(default=None, gt=0, le=10)
    """target for the 90th percentile of gaps between tokens; null sets no target"""
    up_after_seconds: Seconds = Field(default=30.0, ge=1, le=3600)
    """how long a target must be missed before islands or workers start; figures cover this time"""
    down_after_seconds: Seconds = Field(default=300.0, ge=1, le=86400)
    """how long fewer islands or workers must have been enough before some end"""
    cooldown_seconds: Seconds = Field(default=60.0, ge=0, le=86400)
    """how long the policy does nothing after a change of islands or roles, by itself or by hand"""

    @property
    def targets(self) -> dict[str, float]:
        """The targets that are set, by their keys."""
        values = {name: getattr(self, name) for name in ("queue_seconds", "first_token_seconds", "token_seconds")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def is_automatic(self) -> bool:
        """True if the policy changes the number of islands."""
        return bool(self.targets) and self.max_islands is not None and self.max_islands > self.min_islands

    @property
    def moves_roles(self) -> bool:
        """True if the policy changes the workers of islands."""
        return bool(self.targets) and self.max_workers is not None

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if self.max_islands is not None and self.max_islands < self.min_islands:
            raise ValueError(f"must have min_islands, here {self.min_islands}, of at most max_islands")
        if self.max_workers is None:
            for name in ("min_prefill", "min_decode"):
                if name in self.model_fields_set and getattr(self, name) > 1:
                    raise ValueError(f"must have max_workers where {name} is set, here {getattr(self, name)}")
        elif self.max_workers < self.min_prefill + self.min_decode:
            least = f"min_prefill and min_decode, here {self.min_prefill} and {self.min_decode}"
            raise ValueError(f"must have max_workers, here {self.max_workers}, of at least {least}, together")
        elif not self.targets:
            raise ValueError(
                f"must have queue_seconds, first_token_seconds or token_seconds where max_workers is set, here "
                f"{self.max_workers}"
            )
        if self.targets and self.max_islands is None and self.max_workers is None:
            raise ValueError(f"must have max_islands or max_workers where {' or '.join(self.targets)} is set")
        return self
