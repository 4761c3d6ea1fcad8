"""Keeps the unit tier what it is: a test that starts a process, compiles or loads transformers fails with words."""

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from multiprocessing import util
from typing import Any

import pytest

from tandem.cache.kernels.build.native_build import load_library

PRODUCT = ("cache", "transfer", "workers")
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"})


class UnitGuard:
    """A plugin of pytest. Python tells it of all that is started or imported, in all threads, by audit events."""

    def __init__(self) -> None:
        self.done: list[str] = []  # by the test at work
        self._test = ""
        sys.addaudithook(self.audit)  # there is no way to remove one

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._test:
            return
        if event in STARTS:
            self._refuse(f"starts a process ({event})")
        elif event == "import" and str(args[0]).partition(".")[0] == "transformers":
            self._refuse("imports transformers")

    def _refuse(self, what: str) -> None:
        self.done.append(what)
        pytest.fail(
            f"{self._test} {what}, so it is no unit test: add its file to NOT_UNIT in tests/tiers.py", pytrace=False
        )

    @contextmanager
    def watch(self, test: str) -> Iterator[None]:
        self._test, self.done = test, []
        try:
            yield
        finally:
            self._test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self.watch(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Fails, too, where the code under test caught what _refuse raised, or another thread had it."""
        result = yield
        if self.done:
            self._refuse(self.done[0])
        return result


def install(config: pytest.Config) -> None:
    """Loads our C libraries first: a machine compiles them once, and each process asks the compiler for its version."""
    for source in sorted(path for folder in PRODUCT for path in (config.rootpath / folder).rglob("*.c")):
        load_library(source)
    guard = UnitGuard()
    config.pluginmanager.register(guard, "unit guard")
    start = util.spawnv_passfds  # type: ignore[attr-defined]  # it has no audit event

    def spawn(*args: Any) -> int:
        guard.audit("os.posix_spawn", ())
        return start(*args)

    util.spawnv_passfds = spawn  # type: ignore[attr-defined]
