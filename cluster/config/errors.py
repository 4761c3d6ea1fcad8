"""Describes in words what is wrong with a configuration: the key, the value received, what it must be."""

import difflib
import reprlib
from collections.abc import Iterator, Sequence

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

MAX_SHOWN = 80  # characters of a value in an error
SECRETS = ("api_key",)


def explain(finding: ErrorDetails, config: type[BaseModel]) -> str:
    """Describes one of pydantic's findings about a `config` in a line: dotted key, value received, what it must
    be."""
    location = [str(part) for part in finding["loc"]]
    if not location:  # of the whole config: the message names its keys itself
        return finding["msg"].removeprefix("Value error, ")
    dotted = cut(".".join(location))
    if finding["type"] in ("extra_forbidden", "invalid_key"):
        section = _section(config, location[:-1])
        near = _near(config, section, location)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        return f"unknown key {dotted}; {hint}known here: {names(section)}"
    description = _description(config, location)
    if finding["type"] == "model_type":
        accepted = f"must be a section with keys {names(_section(config, location))}"
    elif finding["type"] == "string_pattern_mismatch":
        return f"{dotted} is {shown(finding['input'])}; it must be {description}"
    else:
        accepted = finding["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    value = finding["input"]
    found = "hidden" if location[-1] in SECRETS else shown(value)
    if isinstance(value, dict) and (_is_section(config, location) or any(value.get(name) for name in SECRETS)):
        found = cut(f"a section with {', '.join(str(key) for key, one in value.items() if one not in (None, False))}")
    return f"{dotted} is {found}; it {accepted} ({description})"


def explain_yaml(error: yaml.YAMLError) -> str:
    """Returns the place of the error and its reason, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def shown(value: object) -> str:
    """Shows a value, whatever it is, in up to MAX_SHOWN characters."""
    short = reprlib.Repr()  # repr() of YAML's aliases may grow without bound
    short.maxstring = short.maxother = short.maxlong = MAX_SHOWN
    return cut("null" if value is None else short.repr(value))


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def names(section: type[BaseModel]) -> str:
    """Returns the section's keys, with commas between them."""
    return ", ".join(section.model_fields)


def _description(config: type[BaseModel], location: Sequence[str]) -> str:
    """Returns the description of the key at that location, or of the mapping that the location leads into."""
    description: str | None = None
    for name in location:
        field = config.model_fields[name]
        description = field.description
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            break
        config = field.annotation
    return " ".join((description or "").split())


def _is_section(config: type[BaseModel], location: Sequence[str]) -> bool:
    for name in location:
        annotation = config.model_fields[name].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return False
        config = annotation
    return True


def _near(config: type[BaseModel], section: type[BaseModel], location: Sequence[str]) -> list[str]:
    """Returns dotted keys that may be meant: a similar name in the same section, else an equal or similar name
    elsewhere."""
    *before, name = location
    if near := difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.8):
        return [".".join([*before, near[0]])]
    keys = {key: key.rpartition(".")[2] for key in _keys(config)}
    wanted = difflib.get_close_matches(name, keys.values(), n=1, cutoff=0.85)
    if wanted:
        return [key for key, last in keys.items() if last == wanted[0]]
    near = difflib.get_close_matches(name, section.model_fields, n=1)
    return [".".join([*before, near[0]])] if near else []


def _keys(config: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields all dotted keys."""
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def _section(config: type[BaseModel], location: Sequence[str]) -> type[BaseModel]:
    for name in location:
        annotation = config.model_fields[name].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        config = annotation
    return config
