"""The guard of the unit tier, and which cases of a test are long."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests import tiers
from tests.support.unit_guard import UnitGuard

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def guard() -> UnitGuard:
    """Python keeps it for good. It is at work only while it is told of a test."""
    return UnitGuard()


def start_a_process() -> None:
    subprocess.run(["true"], check=True)


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)


def import_transformers() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "transformers", raising=False)
        import transformers  # noqa: F401


def import_what_is_loaded() -> None:
    """By a test of another file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", ModuleType("transformers"))
        import transformers  # noqa: F401


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (start_a_process, "starts a process"),
        (fork, "starts a process"),
        (import_transformers, "imports transformers"),
        (import_what_is_loaded, "imports transformers"),
    ],
)
def test_a_unit_test_that_does_more_fails(guard: UnitGuard, act: Callable[[], None], message: str) -> None:
    with guard.watch("one"), pytest.raises(pytest.fail.Exception, match=f"one {message}.*NOT_UNIT"):
        act()
    assert message in guard.done[0]


def test_what_lies_below_a_named_folder_is_no_unit_test() -> None:
    assert not tiers.is_unit(ROOT / "tests/e2e/test_up.py", ROOT)
    assert not tiers.is_unit(ROOT / "tests/e2e", ROOT)
    assert tiers.is_unit(ROOT / "tests/transfer/test_codec.py", ROOT)
    assert tiers.is_unit(ROOT / "tests", ROOT)
