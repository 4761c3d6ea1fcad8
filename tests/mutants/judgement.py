"""Judges mutants by their named tests."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from tests.mutants.mutant import Mutant, StaleMutant
from tests.mutants.tree import Tree

PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "-rfE",
    "--tb=no",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-m",
    "not gpu and not long",  # the gate must notice
)
MUTANT_SECONDS = 180.0  # of a machine that is busy with other things
UNCHANGED_SECONDS = 600.0
PASSED, FAILED = 0, 1  # pytest's exit statuses; all others are about pytest itself
NOTICED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Outcome(StrEnum):
    KILLED = "killed"
    SURVIVED = "SURVIVED"
    STALE = "stale"


@dataclass(frozen=True)
class Judgement:
    mutant: Mutant
    outcome: Outcome
    why: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.outcome:8}  {self.mutant.name:44}  {self.seconds:5.1f} s  {self.why}"


@dataclass(frozen=True)
class _Run:
    status: int | None  # None: it did not end in time
    output: str

    @property
    def noticed(self) -> list[str]:
        """Returns the tests that failed."""
        return NOTICED.findall(self.output)

    @property
    def ending(self) -> str:
        return f"pytest ended with status {self.status}: {' '.join(self.output[-300:].split())}"


def judge(mutant: Mutant, tree: Tree, seconds: float = MUTANT_SECONDS) -> Judgement:
    """Puts the mutant into the copy, runs its tests until the first that fails, and takes it out again."""
    began = time.monotonic()
    try:
        with tree.mutated(mutant):
            tree.check_imported(mutant)
            outcome, why = _outcome(mutant, _run(tree, mutant.tests, seconds, "-x"), seconds)
    except StaleMutant as stale:
        outcome, why = Outcome.STALE, str(stale)
    return Judgement(mutant, outcome, why, time.monotonic() - began)


def unchanged_failures(tests: Iterable[str], tree: Tree, seconds: float = UNCHANGED_SECONDS) -> dict[str, str]:
    """Returns why tests cannot judge a mutant, by their names: those that do not pass on a copy without a mutant."""
    named = sorted(set(tests))
    run = _run(tree, named, seconds)
    if run.status == PASSED:
        return {}
    if run.status != FAILED:  # one file that cannot be imported ends all
        files = sorted({test.partition("::")[0] for test in named})
        if len(files) == 1:
            return dict.fromkeys(named, f"without a mutant {run.ending}")
        parts = ([test for test in named if test.partition("::")[0] == file] for file in files)
        return {test: why for part in parts for test, why in unchanged_failures(part, tree, seconds).items()}
    return {
        test: f"{failed} fails without a mutant"
        for test in named
        for failed in run.noticed
        if failed == test or failed.startswith((f"{test}::", f"{test}["))
    }


def _outcome(mutant: Mutant, run: _Run, seconds: float) -> tuple[Outcome, str]:
    if run.status is None:
        outcome = Outcome.KILLED if mutant.hangs else Outcome.SURVIVED
        return outcome, f"its tests had not ended after {seconds:g} s"
    if run.status == PASSED:
        return Outcome.SURVIVED, f"{', '.join(mutant.tests)} pass; {mutant.reason}"
    if run.status == FAILED and run.noticed:
        return Outcome.KILLED, f"by {run.noticed[0]}"
    return Outcome.STALE, run.ending


def _run(tree: Tree, tests: Sequence[str], seconds: float, *options: str) -> _Run:
    process = subprocess.Popen(
        [*PYTEST, *options, *tests],
        cwd=tree.folder,
        env=tree.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        return _Run(process.returncode, output)
    except subprocess.TimeoutExpired:
        return _Run(None, "")
    finally:
        with suppress(ProcessLookupError):  # what its tests have started and left, too
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
