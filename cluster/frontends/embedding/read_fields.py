"""The common fields of these routes' bodies."""

from typing import Any, TypeVar

from pydantic import Field

from tandem.cluster.frontends.http.errors import HttpError
from tandem.cluster.frontends.openai.body_object import BodyObject
from tandem.cluster.frontends.openai.generation_body import SERVICE_TIER
from tandem.cluster.frontends.openai.other_fields import ignored_header
from tandem.cluster.frontends.openai.read_body import read_object
from tandem.cluster.frontends.openai.tokenization import check_model

Ignored = dict[str, str]
"""A header that lists ignored fields; empty for none."""


class ReadFields(BodyObject):
    """vLLM's names."""

    model: str | None = Field(default=None, description="the served model's name")
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, lt=1 << 31, description="an integer of at least 1, or -1"
    )
    priority: int | None = Field(default=None, ge=-(1 << 31), lt=1 << 31, description="an integer")
    service_tier: str | None = Field(default=None, description=SERVICE_TIER)

    @property
    def turn(self) -> dict[str, Any]:
        """Returns priority and tier. A priority overrides the tier."""
        if self.priority is not None:
            return {"priority": self.priority}
        return {"service_tier": self.service_tier or ""}


FieldsT = TypeVar("FieldsT", bound=ReadFields)


def read_fields(kind: type[FieldsT], data: bytes | bytearray, names: tuple[str, ...]) -> tuple[FieldsT, Ignored]:
    """Reads a body. Raises HttpError, also for another model's name."""
    body, ignored = read_object(kind, data)
    check_model(body.model, names)
    if body.truncate_prompt_tokens == 0:
        reason = "truncate_prompt_tokens is 0; it must be at least 1, or -1 for as many as fit"
        raise HttpError(400, reason, param="truncate_prompt_tokens")
    return body, ignored_header(ignored)
