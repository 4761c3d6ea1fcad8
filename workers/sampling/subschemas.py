"""The schemas within a JSON schema."""

from collections.abc import Iterator, Mapping
from typing import Any

MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords that hold schemas by names."""
VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords that hold no schemas."""


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects directly within a schema that may be schemas, by the ends of their JSON pointers.

    Those under unknown keywords count, too: references may lead there.
    """
    for name, held in schema.items():
        if name in MAPS and isinstance(held, dict):
            for key, one in held.items():
                yield from _objects(f"/{_escaped(name)}/{_escaped(key)}", one)
        elif name not in VALUES:
            yield from _objects(f"/{_escaped(name)}", held)


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields all schemas within a schema, itself first, each before its own. RecursionError for deep schemas."""
    if isinstance(schema, dict):
        yield schema
        for _, child in children(schema):
            yield from subschemas(child)
    elif isinstance(schema, list):
        for one in schema:
            yield from subschemas(one)


def copied(schema: Any) -> Any:
    """A copy, in which no object stands at two places. RecursionError for deep schemas."""
    if isinstance(schema, dict):
        return {name: copied(held) for name, held in schema.items()}
    return [copied(one) for one in schema] if isinstance(schema, list) else schema


def _objects(pointer: str, held: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(held, dict):
        yield pointer, held
    elif isinstance(held, list):
        for index, one in enumerate(held):
            yield from _objects(f"{pointer}/{index}", one)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
