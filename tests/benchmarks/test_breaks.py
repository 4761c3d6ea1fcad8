"""Tests that docs/errors.md has the script's mistakes, and the words that the command has for them today."""

import json
import re
import subprocess
import sys

import pytest

from tandem.cache.kernels.build.nvml import read_driver
from tests.benchmarks.breaks import BREAKS, HEAD, PAGE, ROOT, Break, Outcome, row, run

SECONDS = re.compile(r"\| \d+\.\d \|")
LINES = PAGE.read_text(encoding="utf-8").splitlines()
ADVICE = "run tests.benchmarks.breaks --write"
ROWS = [line for line in LINES if line.startswith("| ")][1:]


def test_the_page_has_all_mistakes() -> None:
    assert [line.split(" | ")[0] for line in ROWS] == [f"| {one.title}" for one in BREAKS]
    assert len(BREAKS) >= 40
    assert PAGE.read_text(encoding="utf-8").startswith(HEAD.format(count=len(BREAKS)))


def test_all_are_told_as_the_page_says_and_before_torch_and_ray() -> None:
    """The mistakes run in forks of one process, which imports the command line once."""
    command = [sys.executable, "-m", "tests.benchmarks.breaks", "--forked"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    forks = json.loads(done.stdout)
    told = {one.title: row(one, Outcome(**forks[one.title]["outcome"])) for one in BREAKS}
    for one, line in zip(BREAKS, ROWS, strict=True):
        if not needs_no_gpu(one):
            assert SECONDS.sub("", told[one.title].strip()) == SECONDS.sub("", line), ADVICE
    assert [title for title, one in forks.items() if one["heavy"]] == []


@pytest.mark.long
@pytest.mark.parametrize(("one", "line"), [*zip(BREAKS, ROWS, strict=True)], ids=[one.title for one in BREAKS])
def test_each_is_told_as_the_page_says(one: Break, line: str) -> None:
    if needs_no_gpu(one):
        pytest.skip("this host has GPUs")
    outcome = run(one)
    assert outcome.code in (1, 2)
    assert SECONDS.sub("", row(one, outcome).strip()) == SECONDS.sub("", line), ADVICE


def needs_no_gpu(one: Break) -> bool:
    """Returns whether the mistake needs a host without GPUs, and this host has some."""
    return "GPUs" in one.title and bool(read_driver().gpus)
