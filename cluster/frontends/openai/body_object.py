"""Objects of a request's body, read strictly."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

MAX_FIELDS = 100  # of an object


class BodyObject(BaseModel):
    """Frozen. It converts no type but int to float. null stands for a missing field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    refused: ClassVar[frozenset[str] | None] = None
    """Unknown fields that are refused, unless they are empty. All others are ignored. None: all are refused."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Allows unknown fields in the schema, unless all are refused."""
        made = handler(schema)
        if cls.refused is not None:
            handler.resolve_ref_schema(made).pop("additionalProperties", None)
        return made

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:  # a finding for each would take memory and time
            raise ValueError(f"has {len(value)} fields; it may have at most {MAX_FIELDS}")
        if not isinstance(value, dict):
            return value
        held = {name: one for name, one in value.items() if one is not None}
        if cls.refused is None:
            return held
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: one for name, one in held.items() if name in known or (name in cls.refused and one)}


def text_or_list(value: object) -> str:
    """Returns the tag of a field's value, a text or a list, so that errors are about that form alone. No field has this
    name."""
    return "a list" if isinstance(value, list) else "a text"
