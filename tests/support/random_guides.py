"""Random schemas, regexes and grammars for guided output, and recognizers for texts that follow them."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema

KINDS = ("json_schema", "regex", "grammar")
MOST_SPACES = 32  # between two tokens of JSON
NO_MORE = {"additionalProperties": False}
WORDS = ("a", "bc", "é", " ", "0", '"', "(", "[x]", "ü-", "\\")
Rules = dict[str, list[list[str]]]
"""A grammar: the alternatives of each rule, made of texts and names of rules. Each alternative begins with a text."""


@dataclass(frozen=True)
class Guide:
    """A guide. kind, content: fields of `guided`."""

    kind: str
    content: str
    follows: Callable[[str], bool]


def random_guide(kind: str, seed: int) -> Guide:
    chance = random.Random(f"{kind} {seed}")
    if kind == "json_schema":
        schema = random_schema(chance)
        if chance.random() < 0.8:
            schema["x-guidance"] = {"whitespace_flexible": False}
        return Guide(kind, json.dumps(schema), lambda text: _is_valid(text, schema))
    if kind == "regex":
        regex = random_regex(chance)
        return Guide(kind, regex, lambda text: re.fullmatch(regex, text) is not None)
    rules = random_rules(chance)
    written = as_lark(rules) if seed % 2 else as_gbnf(rules)
    return Guide(kind, written, lambda text: derives(rules, text))


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "enum", "null", *["array", "object", "anyOf"] * (depth < 2)]
    kind = "object" if depth == 0 else chance.choice(kinds)
    if kind == "object":
        names = chance.sample(["a", "bc", "d e", 'f"g', "é"], chance.randint(1, 4))
        properties = {name: random_schema(chance, depth + 1) for name in names}
        return {"type": kind, "properties": properties, "required": names[: chance.randint(0, 4)], **NO_MORE}
    if kind == "array":
        least = chance.randint(0, 2)
        items = random_schema(chance, depth + 1)
        return {"type": kind, "items": items, "minItems": least, "maxItems": least + chance.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(chance, depth + 1) for _ in range(2)]}
    if kind == "enum":
        return {"enum": chance.sample(["x", "y z", 3, None, True, "ü"], 3)}
    if kind == "integer":
        return {"type": kind, "minimum": chance.randint(-99, 0), "maximum": chance.randint(1, 999)}
    return {"type": kind, "maxLength": chance.randint(0, 9)} if kind == "string" else {"type": kind}


def random_regex(chance: random.Random) -> str:
    parts = ["[a-e]", "x{1,3}", "[0-9]{2}", "(foo|ba)", "é?", r"\.", "( [A-Z]){0,2}", "[^a-zé]", "(a|b(c|😀)){1,2}"]
    return "".join(chance.choice(parts) for _ in range(chance.randint(1, 6)))


def random_rules(chance: random.Random) -> Rules:
    """Makes rules that start at rule-0. A rule may use itself; its first alternative is a text alone, so that texts
    end."""
    names = [f"rule-{number}" for number in range(chance.randint(1, 4))]
    rules: Rules = {}
    for number, name in enumerate(names):
        later = [*names[number + 1 :], *names[: number + 1][-1:]]
        alternatives = [[chance.choice(WORDS)]]
        for _ in range(chance.randint(1, 3)):
            rest = [chance.choice([*WORDS[:4], *later]) for _ in range(chance.randint(0, 2))]
            alternatives.append([chance.choice(WORDS), *rest])
        rules[name] = alternatives
    return rules


def as_lark(rules: Rules) -> str:
    names = {name: name.replace("-", "_") for name in rules}
    lines = [f"{names[name]}: {_alternatives(rule, names)}" for name, rule in rules.items()]
    return "\n".join(["start: rule_0", *lines])


def as_gbnf(rules: Rules) -> str:
    names = {name: name for name in rules}
    lines = [f"{name} ::= {_alternatives(rule, names)}" for name, rule in rules.items()]
    return "\n".join(["root ::= rule-0", *lines])


def derives(rules: Rules, text: str) -> bool:
    """Returns whether the grammar derives the text, by the set of places where each rule can end."""

    @cache
    def ends(symbol: str, begin: int) -> frozenset[int]:
        if symbol not in rules:
            return frozenset((begin + len(symbol),)) if text.startswith(symbol, begin) else frozenset()
        found = set[int]()
        for alternative in rules[symbol]:
            places = {begin}
            for one in alternative:
                places = {end for place in places for end in ends(one, place)}
            found |= places
        return frozenset(found)

    return len(text) in ends("rule-0", 0)


def _alternatives(rule: list[list[str]], names: dict[str, str]) -> str:
    """Writes texts in quotes, with JSON's escapes."""
    return " | ".join(
        " ".join(names.get(one) or json.dumps(one, ensure_ascii=False) for one in alternative) for alternative in rule
    )


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    if "x-guidance" not in schema and re.search(rf"[ \t\r\n]{{{MOST_SPACES + 1}}}", text):
        return False
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
