"""JSON schemas whose objects have the properties that they name, and no others."""

from collections.abc import Mapping
from typing import Any

from tandem.workers.sampling.subschemas import copied, subschemas

OTHERS = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
JOINT = ("$ref", "anyOf", "oneOf", "if", "not", "dependentSchemas")


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` where it names properties and says nothing of others.

    Small models add keys of their own for ever otherwise. What is valid by the result is valid by the schema. A schema
    that describes an object in several places, by allOf say, is left as it is. RecursionError for deep ones.
    """
    made = copied(schema)
    parts = list(subschemas(made))
    if any("allOf" in one or ("properties" in one and any(name in one for name in JOINT)) for one in parts):
        return schema
    for one in parts:
        if _names_all(one):
            one["additionalProperties"] = False
    return made


def without_others(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever it names properties and has no such word, as vLLM's
    disable_additional_properties makes it. RecursionError for deep ones."""
    made = copied(schema)
    for one in subschemas(made):
        if any(isinstance(one.get(word), Mapping) for word in ("properties", "patternProperties")):
            one.setdefault("additionalProperties", False)
    return made


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether it names properties, those that it requires among them, and says nothing of others."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or OTHERS & schema.keys() or schema.get("type", "object") != "object":
        return False
    return not isinstance(required, list) or all(name in properties for name in required)
