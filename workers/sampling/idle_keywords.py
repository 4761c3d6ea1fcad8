"""Keywords of a JSON schema that ask for nothing. llguidance refuses some of them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tandem.workers.sampling.subschemas import copied, subschemas

NOTES = frozenset({"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly"})
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Formats that llguidance holds a string to. JSON Schema takes any other as a note."""
DRAFTS = frozenset(
    {
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-04/schema",
    }
)
"""Schemas of other drafts are read as schemas of the newest."""


def without_idle(schema: Any) -> Any:
    """The schema without such keywords: what is valid by one is valid by the other. RecursionError for deep ones."""
    made = copied(schema)
    for one in reversed(list(subschemas(made))):  # what is within a schema comes before it
        if _takes_all(one.get("unevaluatedProperties")):
            one.setdefault("additionalProperties", True)  # else closed() would take what is allowed here
        for word, is_idle in IDLE.items():
            if word in one and is_idle(one[word], one):
                del one[word]
    return made


def _takes_all(schema: object) -> bool:
    return schema is True or (isinstance(schema, Mapping) and schema.keys() <= NOTES)


def _takes_all_names(schema: object) -> bool:
    """Whether each name of a property is valid by it, as a string."""
    if not isinstance(schema, Mapping):
        return schema is True
    types = schema.get("type", "string")
    is_string = types == "string" or (isinstance(types, list) and "string" in types)
    return is_string and not schema.get("minLength") and schema.keys() <= NOTES | {"type", "minLength"}


def _takes_none(schema: object) -> bool:
    return schema is False or (
        isinstance(schema, Mapping) and schema.keys() - NOTES == {"not"} and _takes_all(schema["not"])
    )


def _is_short(schema: Mapping[str, Any]) -> bool:
    """Whether no list has two entries by it."""
    most = schema.get("maxItems")
    return isinstance(most, int | float) and most <= 1


def _asks_of_none(held: object) -> bool:
    """Whether keywords that ask for more where an object has certain properties ask for nothing."""
    return isinstance(held, Mapping) and all(one == [] or _takes_all(one) for one in held.values())


IDLE: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = MappingProxyType(
    {
        "$schema": lambda held, _: not isinstance(held, str) or held.rstrip("#") not in DRAFTS,
        "$vocabulary": lambda held, _: True,
        "format": lambda held, _: isinstance(held, str) and held not in FORMATS,
        "propertyNames": lambda held, _: _takes_all_names(held),
        "uniqueItems": lambda held, schema: held is False or _is_short(schema),
        "contains": lambda _, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
        "minContains": lambda _, schema: "contains" not in schema,
        "maxContains": lambda _, schema: "contains" not in schema,
        "dependencies": lambda held, _: _asks_of_none(held),
        "dependentRequired": lambda held, _: _asks_of_none(held),
        "dependentSchemas": lambda held, _: _asks_of_none(held),
        "unevaluatedProperties": lambda held, _: _takes_all(held),
        "unevaluatedItems": lambda held, _: _takes_all(held),
        "not": lambda held, _: _takes_none(held),
        "then": lambda held, schema: "if" not in schema or _takes_all(held),
        "else": lambda held, schema: "if" not in schema or _takes_all(held),
        "if": lambda _, schema: "then" not in schema and "else" not in schema,
    }
)
"""Each keyword, and whether its value asks for nothing in its schema, in which those before it are idle no more."""
