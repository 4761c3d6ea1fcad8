"""The section of a cluster's configuration that says what drafts tokens."""

from typing import Literal

from pydantic import Field

from tandem.cluster.config_units import Section, Tokens
from tandem.workers.config import SpeculationSettings


class SpeculationSection(Section):
    method: Literal["none", "ngram"] = "none"
    """what drafts tokens that decode steps verify, so that a step may give several: ngram takes what followed the last
    tokens where they stood before; outputs are the same with each"""
    tokens: Tokens = Field(default=3, le=16)
    """most tokens of a draft; fewer, down to none, are drafted where drafts are rejected"""
    max_step_tokens: Tokens = Field(default=32, le=256)
    """most tokens of a step with drafts, drafted ones and one for each sequence; from as many sequences on nothing is
    drafted"""
    max_ngram: Tokens = Field(default=3, le=16)
    """of ngram, the longest run of last tokens that is looked for; a shorter one is taken where that did not stand
    before"""

    @property
    def settings(self) -> SpeculationSettings:
        """What workers get."""
        if self.method == "none":
            return SpeculationSettings()
        return SpeculationSettings(self.method, self.tokens, self.max_step_tokens, self.max_ngram)
