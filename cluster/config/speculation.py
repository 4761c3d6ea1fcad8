"""The section of a cluster's configuration that says what drafts tokens."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from tandem.cluster.config.model import find_model
from tandem.cluster.config.units import Section, Tokens
from tandem.workers.config import SpeculationSettings

WITH_DRAFT = ("draft_model", "eagle3")  # methods that take speculation.draft


class SpeculationSection(Section):
    method: Literal["none", "ngram", "draft_model", "mtp", "eagle3"] = "none"
    """the drafter: ngram (prompt lookup), draft_model (a smaller model), mtp (the checkpoint's MTP layer) or eagle3 (an
    EAGLE-3 head). Outputs stay the same, up to rounding in 16 bits"""
    draft: Annotated[str, AfterValidator(find_model)] | None = Field(default=None, validate_default=True)
    """folder or hub id, as in model.path: of the smaller model, which has the same tokenizer, or of the EAGLE-3 head"""
    tokens: Tokens = Field(default=3, le=16)
    """most tokens of a draft; while drafts are rejected, they get shorter, down to none"""
    max_step_tokens: Tokens = Field(default=32, le=256)
    """most tokens of a step with drafts: the drafted ones, and one for each sequence; steps of this many sequences have
    no drafts"""
    max_ngram: Tokens = Field(default=3, le=16)
    """with ngram, the most last tokens to look up; if they have no earlier occurrence, fewer are looked up"""

    @field_validator("draft")
    @classmethod
    def _is_wanted(cls, draft: str | None, info: ValidationInfo) -> str | None:
        method = info.data.get("method")
        if (draft is None) == (method in WITH_DRAFT):
            raise ValueError(f"must be {'a model' if draft is None else 'null'} where speculation.method is {method}")
        return draft

    @property
    def settings(self) -> SpeculationSettings:
        """The settings that workers get."""
        if self.method == "none":
            return SpeculationSettings()
        return SpeculationSettings(self.method, self.tokens, self.max_step_tokens, self.max_ngram, self.draft or "")
