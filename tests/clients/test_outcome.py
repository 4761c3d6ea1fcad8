"""Tests that a client's failure cannot hide: in its lines, in its exit code, or in a script that nobody runs."""

import re
import subprocess

import pytest

from tests.clients.environments import HERE, NODE, REQUIREMENTS
from tests.clients.outcome import Outcome
from tests.clients.scripts import SCRIPTS


@pytest.mark.parametrize(
    ("output", "code", "kind", "reason"),
    [
        ("ok a chat\nnoise: of a client\nok a stream\n", 0, "passed", ""),
        ("ok a chat\nfailed a stream: Wrong: it said: no\nok c\n", 1, "failed", "a stream: Wrong: it said: no"),
        ("failed a stream: Wrong: no\n", 0, "failed", "a stream: Wrong: no"),
        ("ok a chat\n", 139, "failed", "exit code 139: the end"),
        ("", 0, "failed", "exit code 0: the end"),
    ],
)
def test_what_a_script_says(output: str, code: int, kind: str, reason: str) -> None:
    outcome = Outcome.of(SCRIPTS[0], "1.0", subprocess.CompletedProcess([], code, output, "the end"))
    assert (outcome.kind, outcome.reason) == (kind, reason)
    assert outcome.summary["version"] == "1.0"


def test_every_script_is_run() -> None:
    there = {*(HERE / "python").glob("*.py"), *(HERE / NODE).glob("*.mjs")}
    assert {path for path in there if path.stem != "steps"} == {script.path for script in SCRIPTS}
    assert len({script.name for script in SCRIPTS}) == len(SCRIPTS)


def test_every_client_has_a_version() -> None:
    for script in SCRIPTS:
        if script.environment == NODE:
            pinned = re.findall(r'"(\S+)": "\d+\.\d+\.\d+"', (HERE / NODE / "package.json").read_text())
        else:
            pinned = re.findall(r"^(\S+)==\d+", (HERE / REQUIREMENTS[script.environment]).read_text(), re.MULTILINE)
        assert script.package in pinned
