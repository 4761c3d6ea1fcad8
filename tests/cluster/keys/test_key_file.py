"""The file of keys: what it may hold, and what its errors say."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import ConfigError
from tandem.cluster.keys.key import Key, PriorityBounds, digest_of
from tandem.cluster.keys.key_file import parse_keys, read_keys

HASH = "0a" * 32
TOKEN = "an-operators-token"

WHOLE = f"""
keys:
- name: team-a
  sha256: {HASH}
  requests_per_minute: 600
  tokens_per_minute: 100000
  priority: {{lowest: -3, highest: 10}}
  models: [base, my-lora]
- {{name: B.2_, sha256: {"FF" * 32}}}
"""


def test_a_file_gives_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(WHOLE)
    first, second = read_keys(path)
    models = frozenset({"base", "my-lora"})
    assert first == Key("team-a", b"\x0a" * 32, 600, 100_000, PriorityBounds(-3, 10), models)
    assert second == Key("B.2_", b"\xff" * 32)
    assert [first.may_use(name) for name in ("base", "Base")] == [True, False]
    assert second.may_use("anything")
    assert first.id != second.id


def test_json_is_yaml() -> None:
    (key,) = parse_keys(f'{{"keys": [{{"name": "a", "sha256": "{HASH}", "models": null}}]}}'.encode(), "f")
    assert key == Key("a", b"\x0a" * 32)


def test_a_digest_is_that_of_sha256sum() -> None:
    assert digest_of("tdm-x") == sha256(b"tdm-x").digest()


def entry(**fields: Any) -> str:
    return yaml.safe_dump({"keys": [{"name": "a", "sha256": HASH, **fields}]})


WRONG = [
    ("", "holds null; it must be a mapping with the key keys"),
    ("[]", "holds a list of 0"),
    ("keys: 5", "keys is 5"),
    ("keys: []\nkey: 1", "unknown key key; known here: keys"),
    ("keys:\n- a", r"keys\[0\] is 'a'; it must be a mapping with the keys name, sha256"),
    ("keys: [", "line [12], column [18]: "),
    ("keys: !!python/object:os.system {}", "could not determine a constructor"),
    ("keys: 2021-99-99", "is not YAML: month"),
    ("\0", "is not YAML"),
    ("[" * 100_000, "it is nested too deeply"),
    ("keys: []\nkeys: []", "line 2: 'keys' comes twice in one mapping"),
    (entry(models=["a"]) + "  models: [a, a]\n", "line 6: 'models' comes twice in one mapping"),
    (
        "a: &a [" + "x, " * 1000 + "]\nkeys: [" + "*a, " * 100_000 + "]",
        r"keys\[0\] is a list of 1000; it must be a mapping",
    ),
    (entry(name="a b"), r"keys\[0\].name \(a b\) is 'a b'; it must be 1 to 64 letters, digits and . _ -"),
    (entry(name="a\n"), r"name is 'a\\n'; it must be 1 to 64"),
    (entry(name="x" * 65), "it must be 1 to 64"),
    (entry(name=5), "name is 5; it must be a valid string"),
    (entry(sha256="tdm-my-real-key"), r"sha256 \(a\) is hidden, 15 characters; it must be the SHA-256"),
    (entry(requests_per_minute=0), r"requests_per_minute \(a\) is 0; it must be greater than or equal to 1"),
    (entry(requests_per_minute=1.5), "requests_per_minute .* is 1.5; it must be a valid integer"),
    (entry(tokens_per_minute=True), "tokens_per_minute .* is True"),
    (entry(tokens_per_minute=1 << 40), "tokens_per_minute .* less than or equal to"),
    (entry(priority={"lowest": 3, "highest": 2}), "lowest of at most highest; here are 3 and 2"),
    (entry(priority={"lowest": 3}), "priority.highest .* is missing; it must be the last one"),
    (entry(priority=4), "priority .* is 4; it must be a mapping with the keys lowest, highest"),
    (entry(models=[]), "models .* is a list of 0; it must be names of models and adapters, 1 to 256"),
    (entry(models=[""]), r"models\[0\] .* is ''; it must have at least 1 character"),
    (entry(models=["a", 5]), r"models\[1\] .* is 5"),
    (entry(request_per_minute=5), "unknown key .*request_per_minute .*; known here: name, sha256, requests_per_minute"),
    (yaml.safe_dump({"keys": [{"name": "a", "sha256": HASH}] * 2}), r"keys\[1\] \(a\) has the name 'a', as keys\[0\]"),
    (
        yaml.safe_dump({"keys": [{"name": name, "sha256": HASH} for name in "ab"]}),
        r"keys\[1\] \(b\) has this sha256, as keys\[0\] \(a\)",
    ),
    (
        yaml.safe_dump({"keys": [{"name": f"k{n}", "sha256": f"{n:064x}"} for n in range(1001)]}),
        "at most 1,000 keys",
    ),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        parse_keys(text.encode(), "security.keys_file f")
    assert str(error.value).startswith("security.keys_file f")
    assert len(str(error.value)) < 500
    assert [word for word in ("\n", "real-key") if word in str(error.value)] == []


def test_a_thousand_keys_fit() -> None:
    text = yaml.safe_dump({"keys": [{"name": f"k{n}", "sha256": f"{n:064x}"} for n in range(1000)]})
    assert len({key.id for key in parse_keys(text.encode(), "f")}) == 1000


def test_files_that_are_none(tmp_path: Path) -> None:
    pipe, wide, large = (tmp_path / name for name in ("pipe", "wide", "large"))
    os.mkfifo(pipe)
    wide.write_text(WHOLE)
    wide.chmod(0o622)
    large.write_bytes(b"#" * (1 << 20) + b"\n")
    large.chmod(0o600)
    for path, said in [
        (tmp_path, "must be a regular file"),
        (pipe, "must be a regular file"),
        (tmp_path / "none", "cannot be read: No such file"),
        (wide, "has mode 622; others must not write it"),
        (large, "has more than 1048576 bytes"),
    ]:
        with pytest.raises(ConfigError, match=f"security.keys_file {path} {said}"):
            read_keys(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(ConfigError):
            read_keys(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


PIECES = st.sampled_from(
    ["keys:", "- name: a\n", f"  sha256: {HASH}", "\n", " ", "[", "]", "{", "}", "&a ", "*a", "? ", ": ", "- ", "null",
     "!!binary x", "!!timestamp 1", "1_0", "0x", "<<: ", "priority: {lowest: 1, highest: 0}", "models: [a]", "|\n x"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.lists(PIECES, max_size=12).map(lambda parts: "".join(parts).encode())))
def test_any_bytes_give_keys_or_a_clear_error(content: bytes) -> None:
    check_read(content)


def check_read(content: bytes) -> None:
    said = "f"
    try:
        assert all(len(key.sha256) == 32 for key in parse_keys(content, "f"))
    except ConfigError as error:
        said = str(error)
    assert said.startswith("f")
    assert len(said) < 600


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(HASH))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(LEAVES, inner, max_size=3)),
    max_leaves=6,
)
FIELDS = ["name", "sha256", "requests_per_minute", "tokens_per_minute", "priority", "models", "other", "lowest"]
ENTRIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(ENTRIES, max_size=3))
def test_any_values_give_keys_or_a_clear_error(entries: list[dict[str, Any]]) -> None:
    check_read(yaml.safe_dump({"keys": entries}).encode())


def test_a_keys_file_needs_an_operators_token(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(WHOLE)
    with pytest.raises(ConfigError, match="must have token_file or api_key, the operator's token, where keys_file is"):
        load_config(None, {"security.keys_file": str(path)})
    load_config(None, {"security.keys_file": str(path), "security.api_key": TOKEN}).security.check()


def test_a_bad_keys_file_is_told_before_anything_starts(tmp_path: Path) -> None:
    config = load_config(None, {"security.keys_file": str(tmp_path / "none"), "security.api_key": TOKEN})
    with pytest.raises(ConfigError, match=r"security.keys_file .*none cannot be read"):
        config.security.check()
