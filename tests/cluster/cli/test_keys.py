"""`tandem key`: files of keys change by one entry, and are never seen half written."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.cluster.cli.commands import main
from tandem.cluster.cli.keys.file_text import with_entry, without_entry
from tandem.cluster.cli.keys.replaced_file import replace_file
from tandem.cluster.client import Client
from tandem.cluster.credentials import ClientSecurity
from tandem.cluster.errors import RateLimited, TandemError, UsageError
from tandem.cluster.keys.key import digest_of
from tandem.cluster.keys.key_file import parse_keys, read_keys
from tests.cluster.open_gateway import BODY, PROMPT, TOKENS, open_gateway
from tests.cluster.scripted_model import make_scripted
from tests.support.http_client import COMPLETIONS, post

Capture = pytest.CaptureFixture[str]
HASH = "0a" * 32
OPERATOR = "the-operators-own-token"
COMMENTED = f"""# keys of the teams
keys:
# the first one
- name: a  # of Ada
  sha256: {HASH}

# the second one
- name: b
  sha256: {"0b" * 32}
  models:
  - x
  - y
# the end
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["key", *arguments])
    return int(ended.value.code or 0)


def test_a_new_key_is_printed_once_and_its_hash_is_kept(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "keys.yaml"
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "9000", "--models", "base,my-lora")
    assert run("new", "team-a", *limits, "--priority", "-3:10", "--file", str(path)) == 0
    said = capsys.readouterr()
    made = said.out.strip()
    assert len(made) == len("tdm-") + 43
    assert made.startswith("tdm-")
    assert made not in said.err + path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    (key,) = read_keys(path)
    assert key.sha256 == digest_of(made) == sha256(made.encode()).digest()
    assert (key.name, key.requests_per_minute, key.tokens_per_minute) == ("team-a", 60, 9000)
    assert key.models == {"base", "my-lora"}
    assert key.priority is not None
    assert (key.priority.lowest, key.priority.highest) == (-3, 10)
    assert run("new", "team-b", "--file", str(path)) == 0
    assert capsys.readouterr().out.strip() != made


def test_without_a_file_the_entry_is_printed_too(capsys: Capture) -> None:
    assert run("new", "1.0", "--models", "a") == 0
    made, entry = capsys.readouterr().out.split("\n", 1)
    (key,) = parse_keys(f"keys:\n{entry}".encode(), "stdout")
    assert (key.name, key.sha256, key.models) == ("1.0", digest_of(made), {"a"})
    assert run("new", "a", "--json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["entry"] == {"name": "a", "sha256": digest_of(values["key"]).hex()}


def test_files_are_listed_checked_and_shortened(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(COMMENTED)
    assert run("list", str(path)) == 0
    assert (
        "b  requests a minute no limit  tokens a minute no limit  priorities any  models x, y"
        in capsys.readouterr().out
    )
    assert run("list", str(path), "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert parse_keys(json.dumps({"keys": listed}).encode(), "stdout") == read_keys(path)
    assert run("remove", "a", "--file", str(path)) == 0
    assert run("check", str(path)) == 0
    assert "is right: 1 key\n" in capsys.readouterr().out
    assert [key.name for key in read_keys(path)] == ["b"]
    path.write_text("keys: [{name: a}]")
    assert run("check", str(path)) == 2
    assert "keys[0].sha256 (a) is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("new", "a", "--file", "FILE"), 2, "has a key of that name"),
        (("new", "c d"), 2, "keys[0].name (c d) is 'c d'"),
        (("new", "c", "--priority", "5"), 2, "--priority is '5'"),
        (("new", "c", "--priority", "5:4"), 2, "lowest of at most highest; here are 5 and 4"),
        (("new", "c", "--models", "a,"), 2, "models[1]"),
        (("new", "c", "--file", "FOLDER"), 2, "is not a regular file"),
        (("new", "c", "--file", "FILE/x"), 1, "Not a directory"),
        (("new", "c", "--file", "LOOP"), 1, "cannot be changed"),
        (("remove", "c", "--file", "FILE"), 2, "has no key of that name. It has: a, b"),
        (("remove", "c", "--file", "NONE"), 2, "is missing"),
        (("check", "NONE"), 2, "cannot be read"),
        (("list", "FOLDER"), 2, "FOLDER "),
    ],
)
def test_what_cannot_be_done_is_named_and_changes_nothing(
    arguments: tuple[str, ...], code: int, said: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "FILE"
    path.write_text(COMMENTED)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "LOOP").symlink_to("LOOP")
    upper = [str(tmp_path / one) if one.isupper() or one == "FILE/x" else one for one in arguments]
    assert run(*upper) == code
    assert said in capsys.readouterr().err
    assert path.read_text() == COMMENTED
    assert sorted(os.listdir(tmp_path)) == ["FILE", "FOLDER", "LOOP"]


def test_comments_and_other_entries_stay() -> None:
    longer = with_entry(COMMENTED, {"name": "c", "sha256": "0c" * 32}, "f")
    assert longer == COMMENTED + f"- name: c\n  sha256: {'0c' * 32}\n"
    shorter = without_entry(longer, "a", "f")
    assert shorter == longer.replace(f"- name: a  # of Ada\n  sha256: {HASH}\n", "")
    with pytest.raises(UsageError, match="has comments"):
        with_entry(f"keys: [{{name: a, sha256: {HASH}}}]  # all", {"name": "c", "sha256": "0c" * 32}, "f")


STYLES = {
    "block": lambda keys: yaml.safe_dump({"keys": keys}, sort_keys=False),
    "indented": lambda keys: (
        "keys:\n" + "".join(f"  {line}\n" for line in yaml.safe_dump(keys).splitlines()) if keys else "keys: []"
    ),
    "flow": lambda keys: yaml.safe_dump({"keys": keys}, default_flow_style=True),
    "json": lambda keys: json.dumps({"keys": keys}, indent=1),
}


@settings(max_examples=60, deadline=None)
@given(style=st.sampled_from(sorted(STYLES)), data=st.data())
def test_random_changes_give_the_same_keys_as_a_list(style: str, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(["a", "1", "1.5", "no", "null", "x-y"]), unique=True, max_size=4))
    keys: list[dict[str, Any]] = [
        {"name": name, "sha256": sha256(name.encode()).hexdigest(), "models": ["m", name]} for name in names
    ]
    text: str = STYLES[style](keys)
    for name in data.draw(st.lists(st.sampled_from(["a", "1", "b", "no"]), max_size=6)):
        there = name in [key["name"] for key in keys]
        if there:
            keys = [key for key in keys if key["name"] != name]
            text = without_entry(text, name, "f")
        else:
            keys.append({"name": name, "sha256": sha256(name.encode()).hexdigest(), "requests_per_minute": 7})
            text = with_entry(text, keys[-1], "f")
        assert parse_keys(text.encode(), "f") == parse_keys(json.dumps({"keys": keys}).encode(), "g")


def test_usage_is_what_a_gateway_has_counted(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    keys = {}
    for name in ("busy", "idle"):
        assert run("new", name, "--requests-per-minute", "2", "--file", str(path)) == 0
        keys[name] = capsys.readouterr().out.strip()
    monkeypatch.setenv("TANDEM_API_KEY", OPERATOR)
    options = {"security.keys_file": str(path), "security.api_key": OPERATOR}
    with open_gateway(make_scripted(tmp_path / "model"), options) as gateway:
        headers = {"authorization": f"Bearer {keys['busy']}"}
        answers = [post(gateway.http, COMPLETIONS, BODY, headers=headers).status_code for _ in range(3)]
        assert answers == [200, 200, 429]
        assert run("usage", "--address", gateway.grpc, "--json") == 0
        counted = {"requests": 2, "prompt_tokens": 2 * len(PROMPT), "output_tokens": 2 * len(TOKENS), "refused": 1}
        none = dict.fromkeys(counted, 0)
        used = json.loads(capsys.readouterr().out)
        assert used == [{"name": "busy", **counted}, {"name": "idle", **none}]
        with Client(gateway.grpc, ClientSecurity(keys["busy"])) as client, pytest.raises(RateLimited) as refused:
            list(client.generate(PROMPT))
        assert 50 < refused.value.retry_after_seconds <= 61
        monkeypatch.setenv("TANDEM_API_KEY", keys["busy"])
        assert run("usage", "--address", gateway.grpc) == 1
        assert "is for operators" in capsys.readouterr().err


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"

    def add(number: int) -> None:
        fields = {"name": f"k{number}", "sha256": sha256(b"%d" % number).hexdigest()}
        replace_file(path, lambda text: with_entry(text, fields, "f"), makes=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(24)))
    assert sorted(key.name for key in read_keys(path)) == sorted(f"k{number}" for number in range(24))
    assert os.listdir(tmp_path) == ["keys.yaml"]


def test_a_file_keeps_its_link_and_its_mode_and_a_failed_write_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text(COMMENTED)
    target.chmod(0o646)
    link.symlink_to(target)
    replace_file(link, lambda text: without_entry(text, "b", "f"), makes=False)
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o644
    assert [key.name for key in read_keys(link)] == ["a"]

    def fails(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    before = target.read_text()
    with pytest.raises(TandemError, match="link cannot be changed: No space left on device"):
        replace_file(link, lambda text: text + "#", makes=False)
    assert target.read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


def test_a_full_file_takes_no_more(tmp_path: Path) -> None:
    text = "keys:\n" + "".join(f"- {{name: k{number}, sha256: {number:063x}a}}\n" for number in range(1000))
    with pytest.raises(UsageError, match="f has 1000 keys; it may have at most 1000"):
        with_entry(text, {"name": "more", "sha256": HASH}, "f")
    assert len(parse_keys(without_entry(text, "k500", "f").encode(), "f")) == 999
