"""Whether docs/errors.md has the mistakes of the script, and the words that the command has for them today."""

import re

import pytest

from tandem.cache.kernels.build.nvml import read_driver
from tests.benchmarks.breaks import BREAKS, HEAD, PAGE, Break, row, run

SECONDS = re.compile(r"\| \d+\.\d \|")
LINES = PAGE.read_text(encoding="utf-8").splitlines()
ROWS = [line for line in LINES if line.startswith("| ")][1:]


def test_the_page_has_all_mistakes() -> None:
    assert [line.split(" | ")[0] for line in ROWS] == [f"| {one.title}" for one in BREAKS]
    assert len(BREAKS) >= 40
    assert PAGE.read_text(encoding="utf-8").startswith(HEAD.format(count=len(BREAKS)))


@pytest.mark.gate("flags of vLLM")
@pytest.mark.parametrize(("one", "line"), [*zip(BREAKS, ROWS, strict=True)], ids=[one.title for one in BREAKS])
def test_each_is_told_as_the_page_says(one: Break, line: str) -> None:
    if "GPUs" in one.title and read_driver().gpus:
        pytest.skip("this host has GPUs")
    outcome = run(one)
    assert outcome.code in (1, 2)
    assert SECONDS.sub("", row(one, outcome).strip()) == SECONDS.sub("", line), "run tests.benchmarks.breaks --write"
