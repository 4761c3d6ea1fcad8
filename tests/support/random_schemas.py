"""Random JSON schemas whose parts refer to each other by pointers, ids and anchors, and random values for them."""

import random
from collections.abc import Callable
from typing import Any

import jsonschema

NAMES = ("a", "b", "$ref")
DEFS = ("plain", "with space", "sl/ash", "til~de", "per%cent")
SCALARS: tuple[Any, ...] = (None, True, 0, 7, "", "x", "long text")
IDLE: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda _: {"propertyNames": {"type": "string"}},
    lambda _: {"propertyNames": {"type": ["string", "null"], "title": "a name"}},
    lambda _: {"propertyNames": True},
    lambda _: {"uniqueItems": False},
    lambda chance: {"format": chance.choice(["path", "password", "int32", "regex", "iri"])},
    lambda _: {"minContains": 3, "maxContains": 1},
    lambda _: {"contains": {"const": "nothing like it"}, "minContains": 0},
    lambda _: {"dependentRequired": {}, "dependentSchemas": {"a": {}, "b": True}},
    lambda _: {"dependentRequired": {"a": []}},
    lambda _: {"if": {"type": "string"}},
    lambda _: {"then": False, "else": False},
    lambda _: {"if": {"type": "string"}, "then": {"description": "any"}, "else": True},
    lambda _: {"not": False},
    lambda _: {"not": {"not": {}}},
    lambda _: {"unevaluatedItems": {}, "unevaluatedProperties": True},
    lambda _: {"deprecated": True, "readOnly": True, "$comment": "x", "x-else": {"type": "nothing"}},
    lambda _: {"title": "t", "description": "d", "default": {"$ref": "#/nowhere"}, "examples": [1]},
)


def random_referring_schema(chance: random.Random) -> dict[str, Any]:
    """Makes a schema with definitions. Its parts refer to them by names that are each written in one of several
    ways."""
    root = chance.choice([None, "https://example.com/root.json", "urn:example:root", "/root"])
    definitions, ways = dict[str, Any](), dict[str, list[str]]()
    for number, name in enumerate(chance.sample(DEFS, chance.randint(1, 4))):
        pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25").replace(" ", "%20")
        definitions[name], ways[name] = {}, [f"#/$defs/{pointer}"]
        if chance.random() < 0.5:
            definitions[name]["$anchor"] = f"anchor{number}"
            ways[name].append(f"#anchor{number}")
        elif chance.random() < 0.5 and root != "urn:example:root":
            definitions[name]["$id"] = f"own{number}"
            ways[name] = [f"own{number}"]  # from the root; its own parts are elsewhere
        if root is not None:
            ways[name] += [root + way for way in ways[name] if way.startswith("#")]
    for definition in definitions.values():
        within = {} if "$id" in definition else ways
        definition |= _random_part(chance, within, depth=1)
    made = _random_part(chance, ways, depth=0)
    return ({} if root is None else {"$id": root}) | made | {"$defs": definitions}


def _random_part(chance: random.Random, ways: dict[str, list[str]], depth: int) -> dict[str, Any]:
    kind = chance.choice(["scalar", "enum", *["ref"] * (3 * bool(ways)), *["object", "array", "anyOf"] * (depth < 3)])
    if depth == 0:
        kind = chance.choice(["object", "array"])
    if kind == "ref":
        if depth == 1:  # a definition that is only a reference might refer to itself
            return {"type": "array", "items": {"$ref": chance.choice(chance.choice(list(ways.values())))}}
        return {"$ref": chance.choice(chance.choice(list(ways.values())))}
    if kind == "object":
        names = chance.sample(NAMES, chance.randint(1, 3))
        properties = {name: _random_part(chance, ways, depth + 2) for name in names}
        required = names[: chance.randint(0, len(names))]
        more = {"additionalProperties": chance.choice([False, True])} if chance.random() < 0.5 else {}
        return {"type": "object", "properties": properties, "required": required, **more}
    if kind == "array":
        return {"type": "array", "items": _random_part(chance, ways, depth + 2), "maxItems": chance.randint(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [_random_part(chance, {}, depth + 2) for _ in range(2)]}  # no endless references
    if kind == "enum":
        return {"enum": [*chance.sample(SCALARS, 2), {"$ref": "#"}]}
    return {"type": chance.choice(["string", "integer", "boolean", "null"])}


def add_idle_keywords(schema: Any, chance: random.Random) -> Any:
    """Adds keywords without effect to some of the schema's parts."""
    if isinstance(schema, list):
        return [add_idle_keywords(one, chance) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for name, held in schema.items():
        if name in ("properties", "$defs"):
            made[name] = {key: add_idle_keywords(one, chance) for key, one in held.items()}
        else:
            made[name] = held if name == "enum" else add_idle_keywords(held, chance)
    if "$ref" not in made:
        for idle in chance.sample(IDLE, chance.randint(0, 3)):
            more = idle(chance)
            if not any(_is_near(name, other) for name in more for other in made):
                made = made | more
    return made


def _is_near(one: str, other: str) -> bool:
    """Returns whether the meaning of one keyword may depend on the other."""
    near = ({"if", "then", "else"}, {"contains", "minContains", "maxContains"})
    return one == other or any({one, other} <= words for words in near)


def random_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.choice(["scalar", "object", "array"]) if depth < 3 else "scalar"
    if depth == 0:
        kind = chance.choice(["object", "array"])
    if kind == "object":
        return {name: random_value(chance, depth + 1) for name in chance.sample(NAMES, chance.randint(0, 3))}
    if kind == "array":
        return [random_value(chance, depth + 1) for _ in range(chance.randint(0, 2))]
    return chance.choice([*SCALARS, {"$ref": "#"}])


def valid(value: Any, schema: Any) -> bool:
    """Validates by the newest draft, which treats formats as annotations."""
    return jsonschema.Draft202012Validator(schema).is_valid(value)
