"""Reads a cluster's YAML, and overrides of its keys from options and the environment.

Raises ConfigError for anything malformed.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from tandem.cluster.config.errors import SECRETS, cut, explain_yaml, shown
from tandem.cluster.errors import ConfigError

PREFIX = "TANDEM_"
Scalar = int | float | date


def read_mapping(path: Path, keys: str) -> dict[str, Any]:
    """Returns the file's mapping; {} for an empty file. keys: the names that it may have, as an error lists them."""
    try:
        values = _load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "" if path.suffix in (".yaml", ".yml") else "; it must be a YAML file: give a model by --model"
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {explain_yaml(error)}") from None
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path}: holds {shown(values)}; it must be a mapping with keys {keys}")
    return values or {}


def _load_yaml(text: str) -> Any:
    """Returns what safe_load returns. Raises YAMLError for every error of safe_load."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except Exception as error:  # its constructors let through errors of malformed numbers, dates and tags
        raise yaml.YAMLError(f"a value does not have the form that it begins with: {error}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `dotted.key=value` into the key and the value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set is {shown(text)}; it must be KEY=VALUE, such as cache.page_size=32")
    try:
        return key, _load_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set is {shown(text)}; its value must be YAML: {explain_yaml(error)}") from None


def environment_keys(
    environ: Mapping[str, str], sections: Iterable[str], is_text: Callable[[str], bool]
) -> list[tuple[str, tuple[str, Any]]]:
    """Returns each variable that sets a key, with the dotted key and its value: `TANDEM_GATEWAY__PORT=8080` is
    gateway.port.

    Two underscores stand for the dot. The value is YAML, as with --set. For a key that takes text, by is_text(), digits
    are text, too. Variables that begin with TANDEM_ and have no two underscores are for other uses.
    """
    found: list[tuple[str, tuple[str, Any]]] = []
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        key = variable.removeprefix(PREFIX).lower().replace("__", ".")
        if "." not in key and key not in sections:
            continue
        try:
            value = _load_yaml(environ[variable])
            found.append((variable, (key, environ[variable] if isinstance(value, Scalar) and is_text(key) else value)))
        except yaml.YAMLError as error:
            value_shown = "hidden" if key.rpartition(".")[2] in SECRETS else shown(environ[variable])
            raise ConfigError(f"{variable} is {value_shown}; it must be YAML: {explain_yaml(error)}") from None
    return found


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a dotted key, and adds missing sections."""
    *sections, name = key.split(".")
    for depth, section in enumerate(sections, start=1):
        if values.get(section) is None:
            values[section] = {}
        values = values[section]
        if not isinstance(values, dict):
            raise ConfigError(
                f"{cut(key)} cannot be set: {cut('.'.join(sections[:depth]))} is {shown(values)}, not a section"
            )
    values[name] = value
