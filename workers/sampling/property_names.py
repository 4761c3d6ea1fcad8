"""`propertyNames` of a JSON schema, by keywords that llguidance knows."""

from collections.abc import Mapping
from typing import Any

from tandem.workers.sampling.idle_keywords import NOTES
from tandem.workers.sampling.subschemas import copied, subschemas

BESIDE = frozenset({"properties", "patternProperties", "unevaluatedProperties"})  # it is left as it is next to these


def with_properties(schema: Any) -> Any:
    """Returns the schema with `properties` for listed names, and `patternProperties` for names of a pattern or a
    length, as zod's records have them. Both schemas accept the same values. RecursionError for deep schemas."""
    made = copied(schema)
    for one in subschemas(made):
        names = one.get("propertyNames")
        if isinstance(names, Mapping) and BESIDE.isdisjoint(one):
            found = _by_names(names, one.get("additionalProperties", True))
            if found is not None:
                del one["propertyNames"]
                one |= {**found, "additionalProperties": False}
    return made


def _by_names(names: Mapping[str, Any], held: Any) -> dict[str, Any] | None:
    """Returns keywords by which properties with such names are as `held`. None where no keywords can."""
    if names.get("type", "string") != "string":
        return None
    asked = names.keys() - NOTES - {"type"}
    listed = names["enum"] if asked == {"enum"} else [names["const"]] if asked == {"const"} else None
    if isinstance(listed, list):
        return {"properties": {name: copied(held) for name in listed if isinstance(name, str)}}
    if asked == {"pattern"} and isinstance(names["pattern"], str):
        return {"patternProperties": {names["pattern"]: held}}
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if asked and asked <= {"minLength", "maxLength"} and isinstance(least, int) and isinstance(most, int | str):
        return {"patternProperties": {rf"^[\s\S]{{{least},{most}}}$": held}}
    return None
