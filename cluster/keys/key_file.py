"""The file of callers' keys: YAML, which includes JSON. It holds hashes, no keys."""

import os
import stat
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tandem.cluster.errors import ConfigError
from tandem.cluster.keys.key import Key, PriorityBounds

NAME = r"^[A-Za-z0-9._-]{1,64}$"
MAX_KEYS = 1000
MAX_MODELS = 256  # of a key
MAX_BYTES = 1 << 20  # of a file
MAX_LIMIT = 1 << 39  # a minute
MAX_DEPTH = 8  # of lists and mappings within each other
MAX_SHOWN = 80  # characters of a value in an error
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
Model = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class PriorityEntry(_Part):
    lowest: Priority
    """the first number that a request may ask for, an integer"""
    highest: Priority
    """the last one, an integer"""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.lowest > self.highest:
            raise ValueError(f"must have lowest of at most highest; here are {self.lowest} and {self.highest}")
        return self


class KeyEntry(_Part):
    """One key as the file has it."""

    name: Annotated[str, Field(pattern=NAME)]
    """1 to 64 letters, digits and . _ -"""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    """the SHA-256 of the key's bytes, 64 hexadecimal digits; `tandem key new` prints it"""
    requests_per_minute: Limit | None = None
    """most requests in any minute, at least 1; null sets no limit"""
    tokens_per_minute: Limit | None = None
    """most tokens of prompts and outputs in any minute, at least 1; null sets no limit"""
    priority: PriorityEntry | None = None
    """lowest and highest priority of a request; null allows what gateway.priorities does"""
    models: Annotated[list[Model], Field(fail_fast=True, min_length=1, max_length=MAX_MODELS)] | None = None
    """names of models and adapters, 1 to 256; null allows all"""

    @property
    def key(self) -> Key:
        bounds = None if self.priority is None else PriorityBounds(self.priority.lowest, self.priority.highest)
        return Key(
            self.name,
            bytes.fromhex(self.sha256),
            self.requests_per_minute,
            self.tokens_per_minute,
            bounds,
            None if self.models is None else frozenset(self.models),
        )


class KeyFile(_Part):
    """The whole file."""

    keys: Annotated[list[KeyEntry], Field(fail_fast=True, max_length=MAX_KEYS)]
    """a list of at most 1,000 keys"""


def read_keys(path: Path | str, option: str = "security.keys_file") -> tuple[Key, ...]:
    """The keys of a file. ConfigError names the file, the entry, the field and the value. option: what gives the file.

    It blocks: a file of 1,000 keys takes tens of milliseconds.
    """
    return parse_keys(_content(Path(path).expanduser(), f"{option} {path}"), f"{option} {path}")


def parse_keys(content: bytes, source: str) -> tuple[Key, ...]:
    """Returns the keys that a file's bytes hold. Raises ConfigError as read_keys(). source: the name in its errors."""
    values = _values(content, source)
    try:
        entries = KeyFile.model_validate(values).keys
    except ValidationError as error:
        findings = error.errors()
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise ConfigError(f"{source}: {_explain(findings[0], values)}{more}") from None
    keys = tuple(entry.key for entry in entries)
    for field in ("name", "sha256", "id"):
        _check_unique(source, field, keys)
    return keys


def _content(path: Path, source: str) -> bytes:
    try:
        # A pipe would let open() wait for its other end.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            content = _read(file, source)
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{source} has more than {MAX_BYTES} bytes, which is the most")
    return content


def _read(file: int, source: str) -> bytes:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{source} must be a regular file")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise ConfigError(f"{source} has mode {mode:o}; others must not write it: chmod 600")
    parts: list[bytes] = []
    while part := os.read(file, MAX_BYTES + 1 - sum(map(len, parts))):
        parts.append(part)
    return b"".join(parts)


def _values(content: bytes, source: str) -> Any:
    try:
        text = content.decode("utf-8")
        _check_shape(text, source)
        values = yaml.load(text, Loader)  # a safe one
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is not UTF-8 at byte {error.start}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{source}: {where}{error.problem}") from None
    except ConfigError:
        raise
    except Exception as error:  # YAML's constructors let out what a malformed number, date or tag meets in them
        raise ConfigError(f"{source}: is not YAML: {' '.join(str(error).split())!s:.160}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: holds {_shown(values)}; it must be a mapping with the key keys")
    return values


def _check_shape(text: str, source: str) -> None:
    """Raises ConfigError for nesting deeper than a file of keys needs: the loader in C would overflow its stack. Also
    for a name that a mapping has twice: the loader would take the last."""
    open_: list[_Open] = []
    for event in yaml.parse(text, Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            open_.pop()
            continue
        if open_ and isinstance(event, yaml.NodeEvent):
            said = open_[-1].take(event)
            if said:
                line = event.start_mark.line + 1 if event.start_mark else "?"
                raise ConfigError(f"{source}: line {line}: {said}")
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append(_Open(isinstance(event, yaml.MappingStartEvent)))
            if len(open_) > MAX_DEPTH:
                raise ConfigError(f"{source}: it is nested too deeply")


class _Open:
    """A list or a mapping that the parser has not read to its end."""

    def __init__(self, is_mapping: bool) -> None:
        self._is_mapping = is_mapping
        self._is_name = True  # what comes next
        self._names: set[str] = set()

    def take(self, event: yaml.NodeEvent) -> str:
        """Takes the next node. Returns a complaint, empty if nothing is wrong."""
        said = ""
        if self._is_mapping and self._is_name and isinstance(event, yaml.ScalarEvent):
            said = f"{event.value!r:.80} comes twice in one mapping" if event.value in self._names else ""
            self._names.add(event.value)
        self._is_name = not self._is_name
        return said


def _check_unique(source: str, field: str, keys: tuple[Key, ...]) -> None:
    seen: dict[object, Key] = {}
    for index, key in enumerate(keys):
        value = getattr(key, field)
        before = seen.setdefault(value, key)
        if before is not key:
            what = {"name": f"the name {key.name!r}", "sha256": "this sha256"}.get(field, "a name of this digest")
            first = keys.index(before)
            raise ConfigError(
                f"{source}: keys[{index}] ({key.name}) has {what}, as keys[{first}] ({before.name}) has; "
                f"each key needs {'one' if field != 'id' else 'a name'} of its own"
            )


def _explain(finding: ErrorDetails, values: Any) -> str:
    """Returns a line: the entry and its field, the value, and what the value must be."""
    location = list(finding["loc"])
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    where = f"{where!s:.120}{_named(location, values)}"
    kind, description = _field(location)
    if finding["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown key {where}; known here: {', '.join(kind.model_fields)}"
    if finding["type"] == "missing":
        return f"{where} is missing; it must be {description}"
    found = _shown(finding["input"])
    if "sha256" in location:  # somebody may have written the key itself there
        found = f"hidden, {len(str(finding['input']))} characters"
    said = finding["msg"].removeprefix("Value error, ")
    said = said.replace("Input should be", "must be").replace("String should have", "must have")
    if finding["type"] == "model_type":
        inside = PriorityEntry if location[-1] == "priority" else KeyEntry
        return f"{where} is {found}; it must be a mapping with the keys {', '.join(inside.model_fields)}"
    plain = finding["type"] in ("string_pattern_mismatch", "too_short", "too_long")
    accepted = f"it must be {description}" if plain else f"it {said}"
    return f"{where} is {found}; {accepted}" + ("" if accepted.endswith(description) else f" ({description})")


def _named(location: list[int | str], values: Any) -> str:
    """Returns the name of the entry, if it has one."""
    try:
        name = values["keys"][location[1]]["name"]
    except (LookupError, TypeError):
        return ""
    return f" ({name!s:.64})" if isinstance(name, str) and name.isprintable() else ""


def _field(location: list[int | str]) -> tuple[type[BaseModel], str]:
    """Returns the model that has the field, and the field's description."""
    inside: dict[str, type[BaseModel]] = {"keys": KeyEntry, "priority": PriorityEntry}
    kind, description = KeyFile, ""
    part: type[BaseModel] = kind
    for step in location:
        if isinstance(step, str) and step in part.model_fields:
            description = " ".join((part.model_fields[step].description or "").split())
            kind_of_step = part
            part = inside.get(step, part)
            if step == location[-1]:
                return kind_of_step, description
    return part, description


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = "null" if value is None else repr(value) if isinstance(value, str) else str(value)[: 4 * MAX_SHOWN]
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
