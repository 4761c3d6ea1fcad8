"""Tests what `make demo` shows. Its cluster is an island in this process; those of processes are tested elsewhere."""

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.tools import demo, embedded
from tests.support.island import Island, running_island


class IslandAsCluster:
    def __init__(self, config: ClusterConfig, processes: object = None) -> None:
        keys = {f"speculation.{key}": value for key, value in config.speculation.model_dump().items()}
        self._island: AbstractContextManager[Island] = running_island(Path(str(config.model.path)), keys)

    def start(self) -> str:
        return self._island.__enter__().address

    def stop(self) -> None:
        self._island.__exit__(None, None, None)


@pytest.fixture(params=[[], ["left"]], ids=["clean", "left"])
def left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Scripts /dev/shm for the demo's second look; tests beside this one use it, too."""
    looks, names = iter([["before"], ["before", *request.param]]), os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": next(looks) if path == "/dev/shm" else names(path))
    yield request.param
    assert next(looks, None) is None


def test_a_row_for_each_prompt(
    left: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded, "Cluster", IslandAsCluster)
    monkeypatch.setattr(embedded, "fork_beside", lambda config: None)
    monkeypatch.setenv("COLUMNS", "140")
    assert demo.main([]) == len(left)
    printed = capsys.readouterr().out
    for text in demo.PROMPTS:
        cells = next(line for line in printed.splitlines() if line.startswith(f"│ {text[:20]}")).strip("│").split("│")
        _, prompt, output, first, each, pushed, pages = (cell.strip() for cell in cells)
        assert 0 < int(output) <= demo.OUTPUT_TOKENS
        assert first.endswith(" ms")
        assert each.endswith(" ms")
        assert int(pages) == -(-(int(prompt) + demo.OUTPUT_TOKENS - 1) // 8)
        assert int(pushed.removesuffix(" KiB")) > 0
    assert "6 requests, " in printed
    assert "wrap the execution of a block with methods defined by a context manager" in printed
    assert ("left in /dev/shm: ['left']" if left else "stopped; /dev/shm is as it was") in printed


@pytest.mark.parametrize(
    ("arguments", "asked", "least_accepted", "least_each"),
    [(["--speculate"], "first", 70, 1.2), (["--speculate", "ngram"], "again", 30, 1.08)],
    ids=["model", "ngram"],
)
def test_drafts_that_hold_are_counted(
    arguments: list[str],
    asked: str,
    least_accepted: int,
    least_each: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Drafts hold in the text of the demo's model; with prompt lookup, in the text that it repeats after its own
    answer.

    How many are drafted depends on which rows meet in a step, so the bounds are well below what is usual.
    """
    monkeypatch.setattr(embedded, "Cluster", IslandAsCluster)
    monkeypatch.setattr(embedded, "fork_beside", lambda config: None)
    monkeypatch.setenv("COLUMNS", "140")
    demo.main(arguments)
    printed = capsys.readouterr().out
    found = re.search(
        asked + r": (\d+) tokens drafted, (\d+) accepted .*: ([\d.]+) tokens a step of a request", printed
    )
    assert found is not None
    drafted, accepted, each = int(found[1]), int(found[2]), float(found[3])
    assert drafted >= accepted > least_accepted
    assert each > least_each
    assert "wrap the execution of a block with methods defined by a context manager" in printed
