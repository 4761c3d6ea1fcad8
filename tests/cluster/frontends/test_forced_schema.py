"""The schema of forced calls, against a naive reading of lists of calls."""

import random
from typing import Any

import pytest

from tandem.cluster.frontends.openai.tool_fields import forced_schema
from tandem.cluster.text.parsers.output_parser import Calls
from tests.support.random_schemas import random_referring_schema, random_value, valid


def follows(calls: list[dict[str, Any]], schemas: dict[str, Any], most: int | None) -> bool:
    """Each function is called by its own schema, which is read alone."""
    known = all(call["name"] in schemas and valid(call["parameters"], schemas[call["name"]]) for call in calls)
    return known and 1 <= len(calls) <= (most or len(calls))


@pytest.mark.parametrize("most", [None, 1])
def test_calls_follow_the_schemas_of_their_functions(most: int | None) -> None:
    """Their ids, anchors and definitions have the same names."""
    followed = 0
    for seed in range(100):
        chance = random.Random(seed)
        schemas = {name: random_referring_schema(chance) for name in ("f", "g", "h")}
        forced = forced_schema(Calls(schemas, required=True, most=most))
        named = forced_schema(Calls(schemas, named="g"))
        for _ in range(10):
            names = chance.choices(("f", "g", "h", "nobody"), (3, 3, 3, 1), k=chance.randint(0, 2))
            calls = [{"name": name, "parameters": random_value(chance)} for name in names]
            expected = follows(calls, schemas, most)
            assert valid(calls, forced) == expected, (calls, schemas)
            value = random_value(chance)
            assert valid(value, named) == valid(value, schemas["g"])
            followed += expected
    assert followed > 30


@pytest.mark.parametrize("parameters", [{"properties": {"a": {}}}, {"description": "any"}, {"required": ["a"]}])
def test_arguments_are_an_object(parameters: dict[str, Any]) -> None:
    forced = forced_schema(Calls({"f": parameters}, named="f"))
    assert valid({"a": 1}, forced)
    assert not any(valid(value, forced) for value in (None, [], "a", 3))
