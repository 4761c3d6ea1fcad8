"""The base of the configuration's sections: numbers with units, and the rules that all sections follow."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

# A number's unit stands in its type, for docs/configuration.md.
Adapters = Annotated[int, Field(ge=1, json_schema_extra={"unit": "adapters"})]
AnyAdapters = Annotated[int, Field(ge=0, json_schema_extra={"unit": "adapters"})]
AnyBytes = Annotated[int, Field(ge=0, json_schema_extra={"unit": "bytes"})]
AnyWorkers = Annotated[int, Field(ge=0, json_schema_extra={"unit": "workers"})]
Bytes = Annotated[int, Field(ge=1, json_schema_extra={"unit": "bytes"})]
Calls = Annotated[int, Field(ge=1, json_schema_extra={"unit": "calls"})]
Cpus = Annotated[int, Field(ge=1, json_schema_extra={"unit": "CPUs"})]
Factor = Annotated[float, Field(gt=0, json_schema_extra={"unit": "factor"})]
Fraction = Annotated[float, Field(gt=0, le=1, json_schema_extra={"unit": "fraction"})]
Hosts = Annotated[int, Field(ge=1, json_schema_extra={"unit": "hosts"})]
Inputs = Annotated[int, Field(ge=1, json_schema_extra={"unit": "inputs"})]
Islands = Annotated[int, Field(ge=1, json_schema_extra={"unit": "islands"})]
ManyBytes = Annotated[int, Field(ge=1 << 20, json_schema_extra={"unit": "bytes"})]
Mebibytes = Annotated[int, Field(ge=1, json_schema_extra={"unit": "MiB"})]
Messages = Annotated[int, Field(ge=1, json_schema_extra={"unit": "messages/s"})]
Pages = Annotated[int, Field(ge=1, json_schema_extra={"unit": "pages"})]
Placements = Annotated[int, Field(ge=1, json_schema_extra={"unit": "placements"})]
Port = Annotated[int, Field(ge=0, le=65535, json_schema_extra={"unit": "TCP port"})]
Positions = Annotated[int, Field(ge=1, json_schema_extra={"unit": "positions"})]
Processes = Annotated[int, Field(ge=1, json_schema_extra={"unit": "processes"})]
Requests = Annotated[int, Field(ge=1, json_schema_extra={"unit": "requests"})]
Ranks = Annotated[int, Field(ge=1, json_schema_extra={"unit": "ranks"})]
Restarts = Annotated[int, Field(ge=0, json_schema_extra={"unit": "restarts"})]
Seconds = Annotated[float, Field(json_schema_extra={"unit": "s"})]
Sequences = Annotated[int, Field(ge=1, json_schema_extra={"unit": "sequences"})]
Share = Annotated[float, Field(json_schema_extra={"unit": "fraction"})]
Threads = Annotated[int, Field(ge=1, json_schema_extra={"unit": "threads"})]
Tokens = Annotated[int, Field(ge=1, json_schema_extra={"unit": "tokens"})]
Workers = Annotated[int, Field(ge=1, json_schema_extra={"unit": "workers"})]


class Section(BaseModel):
    """Frozen. It refuses unknown keys, and converts no type but int to float. Docstrings describe fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return {} if value is None else value  # a section whose keys are all commented out
