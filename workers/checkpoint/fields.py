"""Typed reading of a JSON object: each getter returns a value of the type it names, or says what is wrong."""

import json
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.workers.checkpoint.errors import CheckpointMissing, InvalidConfig
from tandem.workers.checkpoint.files import read_text

MAX_INTEGER = (1 << 31) - 1  # more than any model has of anything
MAX_JSON_BYTES = 32 << 20  # the index of 100,000 tensors has 10 MB
MAX_TOKEN_IDS = 4096  # of one field
SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxother = 100


class Fields:
    """The fields of one JSON object; `source` is what errors call it, such as the path of config.json.

    A field that is null counts as absent, but for boolean(), which takes null for false, as transformers does. A getter
    without a default raises InvalidConfig when its field is absent.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    @classmethod
    def from_file(cls, path: Path) -> "Fields":
        """CheckpointMissing when there is no such file of at most MAX_JSON_BYTES, InvalidConfig when it holds no JSON
        object."""
        try:
            values = json.loads(read_text(path, MAX_JSON_BYTES))
        except FileNotFoundError:
            raise CheckpointMissing(f"{path} is not there") from None
        except RecursionError:
            raise InvalidConfig(f"{path} is not readable JSON: it is nested too deeply") from None
        except ValueError as error:  # also an integer of thousands of digits
            raise InvalidConfig(f"{path} is not readable JSON: {error}") from None
        if not isinstance(values, dict):
            raise InvalidConfig(f"{path} holds a {type(values).__name__}; it must hold a JSON object")
        return cls(values, str(path))

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
        value = self._get(name, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.invalid(name, f"an integer of at least {minimum}")
        if value > maximum:
            raise self.invalid(name, f"at most {maximum}")
        return value

    def number(self, name: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self._get(name, default, "a number")
        if not _is_finite(value) or value < 0:
            raise self.invalid(name, "a finite number of at least 0")
        if positive and value == 0:
            raise self.invalid(name, "a finite number above 0")
        return float(value)

    def number_or_null(self, name: str, default: float | None) -> float | None:
        """Above 0, for a field where null says that there is none, and that may differ from absence."""
        if name in self._values and self._values[name] is None:
            return None
        return None if default is None and name not in self else self.number(name, default, positive=True)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._get(name, False if name in self._values else default, "true or false")
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self.invalid(name, "a string")
        return value

    def integers(self, name: str, what: str = "token id") -> tuple[int, ...]:
        """Returns one integer or a list of them; () when absent."""
        value = self._values.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if len(values) > MAX_TOKEN_IDS:
            raise self.invalid(name, f"at most {MAX_TOKEN_IDS} {what}s, and not {len(values)}")
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
            raise self.invalid(name, f"a {what} or a list of {what}s")
        return tuple(values)

    def numbers(self, name: str) -> tuple[float, ...]:
        values = self._get(name, None, "a list of numbers")
        if not isinstance(values, list) or not all(map(_is_finite, values)):
            raise self.invalid(name, "a list of finite numbers")
        return tuple(float(value) for value in values)

    def section(self, name: str) -> "Fields":
        """Returns a nested object, empty when absent."""
        value = self._values.get(name)
        if value is None:
            return Fields({}, f"{self.source}: {name}")
        if not isinstance(value, dict):
            raise self.invalid(name, "an object")
        return Fields(value, f"{self.source}: {name}")

    def invalid(self, name: str, accepted: str) -> InvalidConfig:
        return InvalidConfig(
            f"{self.source}: {_cut(name)} is {SHOWN.repr(self._values.get(name))}; it must be {accepted}"
        )

    @property
    def values(self) -> Mapping[str, Any]:
        """All fields, unchecked."""
        return self._values

    def names(self) -> list[str]:
        return list(self._values)

    def _get(self, name: str, default: object, accepted: str) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise InvalidConfig(f"{self.source}: {_cut(name)} is missing; it must be {accepted}")
        return default


def _cut(name: str) -> str:
    return SHOWN.repr(name)[1:-1]


def _is_finite(value: object) -> bool:
    """Whether a float can hold it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
