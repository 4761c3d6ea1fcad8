"""Tests of the benchmark of the gate: what it reads."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import gate

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_up" name="test_down" time="3.5"/>
<testcase classname="tests.e2e.test_up" name="test_up[a.b]" time="1.25"/>
<testcase classname="tests.cluster.test_cli.TestGenerate" name="test_one" time="4"/>
</testsuite></testsuites>"""


def test_the_slowest_tests_and_files_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    monkeypatch.setattr("sys.argv", ["gate", "--junit", str(tmp_path / "junit.xml")])
    gate.main()
    assert json.loads(capsys.readouterr().out) == {
        "tests": 3,
        "slowest_tests": [
            [4.0, "tests/cluster/test_cli.py::test_one"],
            [3.5, "tests/e2e/test_up.py::test_down"],
            [1.25, "tests/e2e/test_up.py::test_up[a.b]"],
        ],
        "slowest_files": [[4.75, "tests/e2e/test_up.py"], [4.0, "tests/cluster/test_cli.py"]],
    }


def test_a_gate_that_fails_has_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / ".ci" / "run"
    run.parent.mkdir()
    run.write_text("#!/bin/sh\nexit 3\n")
    run.chmod(0o755)
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="exit status 3"):
        gate.run_gate(tmp_path / "junit.xml")
