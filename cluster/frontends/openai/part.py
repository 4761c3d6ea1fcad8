"""Objects of a request's body, read strictly."""

from pydantic import BaseModel, ConfigDict, model_validator

MAX_FIELDS = 100  # of an object


class Part(BaseModel):
    """Frozen. It takes no unknown field and converts no type but int to float. null stands for a missing field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:  # a finding for each would take memory and time
            raise ValueError(f"has {len(value)} fields; at most {MAX_FIELDS} are accepted")
        return {name: held for name, held in value.items() if held is not None} if isinstance(value, dict) else value
