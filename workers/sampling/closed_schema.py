"""JSON schemas whose objects have the properties that they name, and no others."""

from collections.abc import Callable, Mapping
from typing import Any

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # of schemas, by names
VALUES = frozenset({"enum", "const", "default", "examples"})  # no schemas
OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
JOINT = ("$ref", "anyOf", "oneOf", "if", "not", "dependentSchemas")


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` where it names properties and says nothing of others.

    Small models add keys of their own for ever otherwise. What is valid by the result is valid by the schema. A schema
    that describes an object in several places, by allOf say, is left as it is. RecursionError for deep ones.
    """
    joint = False

    def look(one: dict[str, Any]) -> dict[str, Any]:
        nonlocal joint
        joint = joint or "allOf" in one or ("properties" in one and any(name in one for name in JOINT))
        properties = one.get("properties")
        named = isinstance(properties, Mapping) and not OTHERS & one.keys() and one.get("type", "object") == "object"
        return one | {"additionalProperties": False} if named and _requires_only(one, properties) else one

    made = _mapped(schema, look)
    return schema if joint else made


def _mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with each schema in it changed."""
    if isinstance(schema, list):
        return [_mapped(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict[str, Any]()
    for name, held in schema.items():
        if name in MAPS and isinstance(held, dict):
            made[name] = {key: _mapped(one, change) for key, one in held.items()}
        else:
            made[name] = held if name in VALUES else _mapped(held, change)
    return change(made)


def _requires_only(schema: dict[str, Any], properties: Any) -> bool:
    required = schema.get("required")
    return not isinstance(required, list) or all(name in properties for name in required)
