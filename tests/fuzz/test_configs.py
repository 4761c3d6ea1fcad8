"""The loader under bad YAML, and under values of any kind at any key."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tests.fuzz.configs import BOMB, fuzz, keys

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=4)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3))


def test_bad_files_are_refused(tmp_path: Path) -> None:
    outcome = fuzz(5, 700, tmp_path / "c.yaml")
    assert min(outcome.values()) > 10, f"{outcome}: the fuzzer has gone blind"


@given(st.dictionaries(st.sampled_from(keys()), VALUES, max_size=4))
def test_a_value_of_any_kind_is_taken_or_a_config_error(values: dict[str, Any]) -> None:
    try:
        outcome = repr(load_config(None, values))
    except ConfigError as error:
        outcome = str(error)
    assert outcome


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 5000, "nested too deeply"),
        (f"name: {'2' * 5000}", "4300 digits"),
        ("name: !!timestamp x", "form that it begins with"),
        (f"name: {BOMB}", "name is \\["),
        ("x" * 900 + ": 1", r"unknown key x{77}\.\.\.;"),
    ],
)
def test_what_the_parser_lets_out_is_a_config_error(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_config(path)
