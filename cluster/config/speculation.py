"""The section of a cluster's configuration that says what drafts tokens."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from tandem.cluster.config.model import find_model
from tandem.cluster.config.units import Section, Tokens
from tandem.workers.config import SpeculationSettings

WITH_DRAFT = ("draft_model", "eagle3")  # methods that take speculation.draft


class SpeculationSection(Section):
    method: Literal["none", "ngram", "draft_model", "mtp", "eagle3"] = "none"
    """what drafts tokens that decode steps verify, so that a step may give several: ngram takes what followed the last
    tokens where they stood before, draft_model asks a smaller model, mtp the checkpoint's layer for multi-token
    prediction (DeepSeek-V3, GLM-4-MoE and Lite), eagle3 an EAGLE-3 head; outputs are the same with each,
    but for what steps of several tokens round otherwise in 16 bits"""
    draft: Annotated[str, AfterValidator(find_model)] | None = Field(default=None, validate_default=True)
    """of draft_model the smaller model, one with the same tokenizer, of eagle3 the head: a folder or hub id, as
    model.path"""
    tokens: Tokens = Field(default=3, le=16)
    """most tokens of a draft; fewer, down to none, are drafted where drafts are rejected"""
    max_step_tokens: Tokens = Field(default=32, le=256)
    """most tokens of a step with drafts, drafted ones and one for each sequence; from as many sequences on nothing is
    drafted"""
    max_ngram: Tokens = Field(default=3, le=16)
    """of ngram, the longest run of last tokens that is looked for; a shorter one is taken where that did not stand
    before"""

    @field_validator("draft")
    @classmethod
    def _is_wanted(cls, draft: str | None, info: ValidationInfo) -> str | None:
        method = info.data.get("method")
        if (draft is None) == (method in WITH_DRAFT):
            raise ValueError(f"must be {'a model' if draft is None else 'null'} where speculation.method is {method}")
        return draft

    @property
    def settings(self) -> SpeculationSettings:
        """What workers get."""
        if self.method == "none":
            return SpeculationSettings()
        return SpeculationSettings(self.method, self.tokens, self.max_step_tokens, self.max_ngram, self.draft or "")
