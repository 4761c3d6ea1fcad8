"""Types of configuration values that are numbers with a unit. docs/configuration.md shows the units."""

from typing import Annotated

from pydantic import Field

Calls = Annotated[int, Field(ge=1, json_schema_extra={"unit": "calls"})]
Cpus = Annotated[int, Field(ge=1, json_schema_extra={"unit": "CPUs"})]
Factor = Annotated[float, Field(gt=0, json_schema_extra={"unit": "factor"})]
Fraction = Annotated[float, Field(gt=0, le=1, json_schema_extra={"unit": "fraction"})]
Islands = Annotated[int, Field(ge=1, json_schema_extra={"unit": "islands"})]
Mebibytes = Annotated[int, Field(ge=1, json_schema_extra={"unit": "MiB"})]
Messages = Annotated[int, Field(ge=1, json_schema_extra={"unit": "messages/s"})]
Pages = Annotated[int, Field(ge=1, json_schema_extra={"unit": "pages"})]
Placements = Annotated[int, Field(ge=1, json_schema_extra={"unit": "placements"})]
Port = Annotated[int, Field(ge=0, le=65535, json_schema_extra={"unit": "TCP port"})]
Positions = Annotated[int, Field(ge=1, json_schema_extra={"unit": "positions"})]
Processes = Annotated[int, Field(ge=1, json_schema_extra={"unit": "processes"})]
Requests = Annotated[int, Field(ge=1, json_schema_extra={"unit": "requests"})]
Restarts = Annotated[int, Field(ge=0, json_schema_extra={"unit": "restarts"})]
Seconds = Annotated[float, Field(json_schema_extra={"unit": "s"})]
Sequences = Annotated[int, Field(ge=1, json_schema_extra={"unit": "sequences"})]
Threads = Annotated[int, Field(ge=1, json_schema_extra={"unit": "threads"})]
Tokens = Annotated[int, Field(ge=1, json_schema_extra={"unit": "tokens"})]
Workers = Annotated[int, Field(ge=1, json_schema_extra={"unit": "workers"})]
