"""Tests the run on mutants of a tiny product: a survivor is a survivor, and what cannot be judged is stale."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.__main__ import main, run
from tests.mutants.judgement import Judgement, Outcome, judge
from tests.mutants.mutant import Mutant, StaleMutant
from tests.mutants.tree import Tree, files_of

LIMITS = """LIMIT = 4
SEEN = 2


def check(count: int) -> None:
    if count > LIMIT:
        raise ValueError(count)
"""
TESTS = """import subprocess
import sys
import time

import pytest

from tandem.cache import limits


def test_limit():
    with pytest.raises(ValueError):
        limits.check(5)


def test_limit_in_a_child():
    code = "from tandem.cache import limits; limits.check(5)"
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode


def test_nothing():
    assert limits.SEEN


def test_broken():
    raise AssertionError


def test_waits():
    while limits.SEEN == 3:
        time.sleep(0.01)
"""
FILES = {
    "cache/__init__.py": "",
    "cache/limits.py": LIMITS,
    "cluster/toplevel/__init__.py": "",
    "tests/test_limits.py": TESTS,
    "tests/test_broken.py": "import nothing\n",
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib"]\n',
}


def mutant(test: str, **changes: object) -> Mutant:
    """Makes a mutant that removes the limit, with one test."""
    one = Mutant(
        name="no-limit",
        file="cache/limits.py",
        find="    if count > LIMIT:\n",
        replace="    if False:\n",
        reason="Counts are limited, or they are not.",
        tests=(f"tests/test_limits.py::{test}",),
    )
    return replace(one, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("product")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def tree(product: Path, tmp_path: Path) -> Tree:
    return Tree(product, list(FILES), tmp_path / "copy")


def judgements(product: Path, *mutants: Mutant) -> list[Judgement]:
    return list(run(mutants, product, list(FILES), processes=1))


def test_a_file_that_cannot_be_read_is_no_fault_of_others(product: Path) -> None:
    broken = mutant("test_limit", tests=("tests/test_broken.py::test_limit",))
    stale, killed = judgements(product, broken, mutant("test_limit"))
    assert stale.outcome is Outcome.STALE
    assert stale.why.startswith("without a mutant pytest ended with status 4: ")
    assert killed.outcome is Outcome.KILLED


def test_survivors_and_killed_ones_are_told_apart(product: Path) -> None:
    killed, survivor, stale = judgements(product, mutant("test_limit"), mutant("test_nothing"), mutant("test_broken"))
    assert (killed.outcome, killed.why) == (Outcome.KILLED, "by tests/test_limits.py::test_limit")
    assert survivor.outcome is Outcome.SURVIVED
    assert str(survivor).startswith("SURVIVED  no-limit")
    assert stale.outcome is Outcome.STALE
    assert "test_broken fails without a mutant" in stale.why
    assert (product / "cache/limits.py").read_text() == LIMITS


def test_what_a_test_starts_gets_the_mutant_too(tree: Tree) -> None:
    assert judge(mutant("test_limit_in_a_child"), tree).outcome is Outcome.KILLED


def test_a_mutant_leaves_with_its_judgement(tree: Tree) -> None:
    """This also holds if both texts have one length and one second, by which Python recognizes compiled modules."""
    changed = mutant("test_waits", find="SEEN = 2", replace="SEEN = 0", tests=("tests/test_limits.py::test_nothing",))
    assert judge(changed, tree).outcome is Outcome.KILLED
    assert judge(mutant("test_nothing"), tree).outcome is Outcome.SURVIVED


@pytest.mark.parametrize(("hangs", "outcome"), [(True, Outcome.KILLED), (False, Outcome.SURVIVED)])
def test_tests_that_do_not_end_count_where_the_list_says_so(tree: Tree, hangs: bool, outcome: Outcome) -> None:
    endless = mutant("test_waits", find="SEEN = 2", replace="SEEN = 3", hangs=hangs)
    judged = judge(endless, tree, seconds=1.0)
    assert (judged.outcome, judged.why) == (outcome, "its tests had not ended after 1 s")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"find": "    if count >= LIMIT:\n"}, "has the text 0 times; it must be there once"),
        ({"find": "count"}, "has the text 3 times; it must be there once"),
        ({"replace": "    if\n"}, "pytest ended with status"),
        ({"tests": ("tests/test_limits.py::test_gone",)}, "pytest ended with status"),
    ],
)
def test_what_no_longer_fits_is_stale(tree: Tree, change: dict[str, object], why: str) -> None:
    judged = judge(mutant("test_limit", **change), tree)
    assert judged.outcome is Outcome.STALE
    assert why in judged.why


def test_a_copy_that_is_not_what_is_imported_is_noticed(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "environment", lambda: {})
    with pytest.raises(StaleMutant, match=r"tandem\.cache\.limits is imported from "):
        tree.check_imported(mutant("test_limit"))


def test_files_are_those_that_git_knows_or_would_take(tmp_path: Path) -> None:
    git: Callable[..., object] = lambda *words: subprocess.run(["git", *words], cwd=tmp_path, check=True)  # noqa: E731
    git("init", "-q")
    for name in ("known", "new", "ignored"):
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", "known", ".gitignore")
    assert sorted(files_of(tmp_path)) == [".gitignore", "known", "new"]


def test_a_name_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mutants", "nobody"])
    with pytest.raises(SystemExit):
        main()
    assert "nobody: there is no such mutant" in capsys.readouterr().err
