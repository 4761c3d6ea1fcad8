"""Keeps the unit tier what it is: a test that starts a process, compiles or loads transformers fails with words.

It is at work in every run, so that the gate notices, too. There one process runs files of all tiers.
"""

import builtins
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

from tandem import cache, transfer, workers
from tandem.cache.kernels.build.native_build import load_library
from tests import tiers

PRODUCT = (cache, transfer, workers)
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"})


class UnitGuard:
    """A plugin of pytest. Audit events of Python tell it what is started or imported. Import statements pass through
    it, too, because a module that another file's test has loaded is no event."""

    def __init__(self, sources: Sequence[Path] = ()) -> None:
        """sources: the product's C files, which unit tests find compiled."""
        self.done: list[str] = []  # by the test at work
        self._sources = sources
        self._test = ""
        self._file = Path()  # of the test at work
        self._others: frozenset[int] = frozenset()  # threads that were there before this file's tests
        self._import = builtins.__import__
        self._hooked = False

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._test or threading.get_ident() in self._others:
            return
        if event in STARTS:
            self._refuse(f"starts a process ({event})")
        elif event == "import" and str(args[0]).partition(".")[0] == "transformers":
            self._refuse("imports transformers")

    def _checked_import(self, name: str, *args: Any, **options: Any) -> Any:
        self.audit("import", (name,))
        return self._import(name, *args, **options)

    def _refuse(self, what: str) -> None:
        self.done.append(what)
        pytest.fail(
            f"{self._test} {what}, so it is no unit test: add its file to NOT_UNIT in tests/tiers.py", pytrace=False
        )

    @contextmanager
    def watch(self, test: str) -> Iterator[None]:
        if not self._hooked:
            sys.addaudithook(self.audit)  # there is no way to remove one; until now there were many events
        self._hooked, self._test, self.done = True, test, []
        self._import, builtins.__import__ = builtins.__import__, self._checked_import
        try:
            yield
        finally:
            self._test, builtins.__import__ = "", self._import

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if item.get_closest_marker("long") or not tiers.is_unit(item.path, item.config.rootpath):
            return (yield)
        if item.path != self._file:
            for source in self._sources:  # a process asks the compiler once, unless a test made it forget
                load_library(source)
            self._file, main = item.path, threading.get_ident()
            self._others = frozenset(one.ident or 0 for one in threading.enumerate()) - {main}
        with self.watch(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Fails even if the code under test caught the error of _refuse, or another thread had it."""
        result = yield
        if self._test and self.done:
            self._refuse(self.done[0])
        return result


def install(config: pytest.Config) -> None:
    folders = [Path(path) for package in PRODUCT for path in package.__path__]
    guard = UnitGuard(sorted(source for folder in folders for source in folder.rglob("*.c")))
    config.pluginmanager.register(guard, "unit guard")
    start = util.spawnv_passfds  # type: ignore[attr-defined]  # it has no audit event

    def spawn(*args: Any) -> int:
        guard.audit("os.posix_spawn", ())
        return start(*args)

    util.spawnv_passfds = spawn  # type: ignore[attr-defined]
