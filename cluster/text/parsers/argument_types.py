"""Finds the type of an argument that a model wrote as bare text, by the JSON schema of its tool's parameters."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

ALIASES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
"""Type names that JSON schema does not have, but clients write."""

TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
ALTERNATIVES = ("anyOf", "oneOf")
MOST_SCHEMAS = 256  # schemas per parameter: references may go in circles
WHOLE = re.compile(r"[+-]?\d{1,300}", re.ASCII)
EXACT = 1 << 53  # integers below it are floats, too


def typed(text: str, parameters: Mapping[str, Any], key: str) -> Any:
    """Returns the value of the argument `key`. A parameter that may be a string stays the text.

    parameters: the schema of all. null and None are None if the parameter may be null or may be no string. A text
    that is no value of its type stays one.
    """
    kinds, listed = _allowed(parameters, key)
    if text in listed:
        return text
    value, word = _parsed(text), text.strip().lower()
    if any(type(one) is type(value) and one == value for one in listed):
        return value
    nothing = word in ("null", "none")
    if nothing and ("null" in kinds or (kinds and "string" not in kinds)):
        return None
    if "string" in kinds:
        return text
    if "boolean" in kinds and word in ("true", "false"):
        return word == "true"
    if kinds & {"integer", "number"} and WHOLE.fullmatch(word):  # also with zeros before it, which JSON has not
        return int(word)
    if not kinds:  # it may be anything, a text too
        return value if isinstance(value, dict | list) else text
    if isinstance(value, str) and kinds & {"array", "object"}:
        value = _parsed(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT:
        return int(value)
    return value


def properties(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yields the names of the schema's parameters."""
    for schema in _alike(parameters, parameters):
        yield from _mapping(schema.get("properties"))


def _allowed(parameters: Mapping[str, Any], key: str) -> tuple[frozenset[str], list[Any]]:
    """Returns the types that the argument may have, empty if the schema names none, and its values if these are
    listed."""
    kinds, listed = set[str](), list[Any]()
    for schema in _of_key(parameters, key):
        for one in _alike(schema, parameters):
            values = one["enum"] if isinstance(one.get("enum"), list) else [one["const"]] if "const" in one else []
            listed += values
            named = one.get("type")
            names = named if isinstance(named, list) else [named]
            known = {ALIASES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)} & TYPES
            kinds |= known or {_kind(value) for value in values}
            kinds |= {"null"} if one.get("nullable") is True else set()
    return frozenset(kinds), listed


def _of_key(parameters: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    for schema in _alike(parameters, parameters):
        held = _mapping(schema.get("properties")).get(key, schema.get("additionalProperties"))
        yield from (held,) if isinstance(held, Mapping) else ()


def _alike(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the schema, and the schemas that it refers to or consists of."""
    waiting, seen = [schema], set[int]()
    while waiting and len(seen) < MOST_SCHEMAS:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        parts: list[Any] = [_referred(one["$ref"], root)] if isinstance(one.get("$ref"), str) else []
        for name in (*ALTERNATIVES, "allOf"):
            held = one.get(name)
            parts += held[:MOST_SCHEMAS] if isinstance(held, list) else []
        waiting += [part for part in parts if isinstance(part, Mapping)]


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Returns the value that a reference within the schema points to; None if there is none."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, Sequence) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "object")


def _parsed(text: str) -> Any:
    """Parses a value of JSON, else of Python as far as JSON has it; else returns the text."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _python(text)
    return value


def _python(text: str) -> Any:
    try:
        value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
