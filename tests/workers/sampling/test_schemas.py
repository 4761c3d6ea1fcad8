"""Rewritten JSON schemas: what is valid by the given one is valid by the rewritten one, and nothing else, as jsonschema
says of random values."""

import itertools
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from tandem.workers.sampling.closed_schema import without_others
from tandem.workers.sampling.idle_keywords import FORMATS, without_idle
from tandem.workers.sampling.property_names import with_properties
from tandem.workers.sampling.schema_references import with_pointers
from tests.support.random_schemas import add_idle_keywords, random_referring_schema, random_value, valid

OLD = {"$schema": "http://json-schema.org/draft-04/schema#"}
SCHEMAS, VALUES = 150, 12


def test_random_references_lead_to_the_same_schemas() -> None:
    accepted = refused = 0
    for seed in range(SCHEMAS):
        chance = random.Random(seed)
        schema = random_referring_schema(chance)
        made = with_pointers(schema)
        moved = {"$defs": {"a/b": with_pointers(schema, "#/$defs/a~1b")}, "$ref": "#/$defs/a~1b"}
        for _ in range(VALUES):
            value = random_value(chance)
            expected = valid(value, schema)
            assert valid(value, made) == valid(value, moved) == expected, (schema, made, value)
            accepted, refused = accepted + expected, refused + (not expected)
    assert min(accepted, refused) > SCHEMAS


def test_random_keywords_that_ask_for_nothing_change_nothing() -> None:
    for seed in range(SCHEMAS):
        chance = random.Random(seed)
        schema = add_idle_keywords(random_referring_schema(chance), chance)
        made = without_idle(with_pointers(schema))
        assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(made)), schema
        for _ in range(VALUES):
            value = random_value(chance)
            assert valid(value, made) == valid(value, schema), (schema, made, value)


NAMES: list[dict[str, Any]] = [
    {"type": "string", "enum": ["a", "b", 3]},
    {"const": "a", "title": "t"},
    {"pattern": "^[a$]"},
    {"type": "string", "pattern": "e"},
    {"minLength": 2},
    {"minLength": 1, "maxLength": 3},
    {"type": "string", "maxLength": 1},
]


@pytest.mark.parametrize("names", NAMES)
def test_rules_for_names_hold(names: dict[str, Any]) -> None:
    for held, more in ((True, {}), ({"type": "integer"}, {"required": ["a"]}), (False, {}), (None, {"type": "object"})):
        schema = {"propertyNames": names, **({} if held is None else {"additionalProperties": held}), **more}
        made = with_properties({"items": schema})["items"]
        assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(made)) or held is False
        for chosen in itertools.chain.from_iterable(
            itertools.combinations(["", "a", "b", "$ref", "e"], n) for n in range(4)
        ):
            for number in (1, "x"):
                value = dict.fromkeys(chosen, number)
                assert valid(value, made) == valid(value, schema), (made, value)


def test_rules_for_names_stay_where_no_other_keyword_has_them() -> None:
    for schema in (
        {"propertyNames": {"enum": ["a"]}, "properties": {"b": {}}},
        {"propertyNames": {"not": {"const": "a"}}},
        {"propertyNames": {"type": "object"}},
        {"propertyNames": {"pattern": "a", "minLength": 2}},
        {"propertyNames": False},
    ):
        assert with_properties(schema) == schema


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"$ref": "#/$defs/a b", "$defs": {"a b": {}}}, {"$ref": "#/$defs/a%20b", "$defs": {"a b": {}}}),
        ({"$ref": "#/$defs/a%25~0~1", "$defs": {"a%~/": {}}}, {"$ref": "#/$defs/a%25~0~1", "$defs": {"a%~/": {}}}),
        ({"$id": "no: id", "$ref": "#x", "$defs": {"y": {"$anchor": "x"}}}, {"$ref": "#/$defs/y", "$defs": {"y": {}}}),
        ({"$dynamicRef": "#x", "$defs": {"y": {"$dynamicAnchor": "x"}}}, {"$ref": "#/$defs/y", "$defs": {"y": {}}}),
        ({"$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}, {"items": {"$ref": "#"}}),
        (OLD | {"id": "u:v", "items": {"$ref": "u:v"}}, OLD | {"items": {"$ref": "#"}}),
        ({"$ref": "https://else.where/x"}, None),
        ({"$ref": "#nowhere", "id": "x"}, None),
        ({"const": {"$ref": "#"}, "enum": [{"$anchor": "y"}], "default": {"$id": "z"}}, None),
        ({"properties": {"$ref": {"$ref": "#/properties/$id"}, "$id": {"type": "null"}}}, None),
        (True, None),
    ],
)  # fmt: skip
def test_references(schema: Any, made: Any) -> None:
    """made: None where it stays as it is."""
    assert with_pointers(schema) == (schema if made is None else made)


def test_what_allows_others_is_not_closed() -> None:
    schema = {"properties": {"a": {}}, "unevaluatedProperties": True}
    assert without_idle(schema) == {"properties": {"a": {}}, "additionalProperties": True}
    asks = {"items": {"uniqueItems": True, "maxItems": 2}, "propertyNames": {"minLength": 1}, "not": {}, "contains": {}}
    assert without_idle(asks) == asks


@pytest.mark.parametrize(
    "name", ["regex", "iri", "uri-reference", "json-pointer", "password", "path", *sorted(FORMATS)]
)
def test_formats_that_strings_are_held_to_are_those_of_llguidance(name: str) -> None:
    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    assert (name in FORMATS) == (not LLMatcher.validate_grammar(grammar))


def test_no_others_are_allowed_where_properties_are_named() -> None:
    named, pattern, more = (
        {"properties": {"x": {}}},
        {"patternProperties": {"x": {}}},
        {"properties": {}, "additionalProperties": {}},
    )
    made = without_others({"allOf": [named, pattern, more], "items": {"type": "object"}})
    closed = {"additionalProperties": False}
    assert made == {"allOf": [named | closed, pattern | closed, more], "items": {"type": "object"}}
    assert jsonschema.Draft202012Validator(made).is_valid(3)
