"""Finds the benchmarks of a checkout, which has the code that runs them: `tests.benchmarks.bench.run`."""

import importlib
import sys
import tomllib
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from tandem.cache.extras import DISTRIBUTION
from tandem.cluster.errors import UsageError

FOLDER = Path("tests", "benchmarks")


def load_benchmarks() -> ModuleType:
    """Imports the benchmarks of the checkout around the current folder. Raises UsageError outside of a checkout."""
    sys.path.insert(0, str(_checkout(Path.cwd())))
    return importlib.import_module("tests.benchmarks.bench.run")


def _checkout(start: Path) -> Path:
    for folder in (start, *start.parents):
        with suppress(OSError, tomllib.TOMLDecodeError):
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
            if project.get("name") == DISTRIBUTION and (folder / FOLDER).is_dir():
                return folder
    raise UsageError(f"the current folder {start} is in no checkout of tandem; the benchmarks live there, in {FOLDER}/")
