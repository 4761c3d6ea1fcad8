"""A copy of the checkout whose packages are what Python imports as `tandem`, in this process's children and theirs."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import cache_from_source
from pathlib import Path

from tests.mutants.mutant import Mutant, StaleMutant

PACKAGES = ("cache", "transfer", "workers", "cluster", "proto", "deploy")
WHERE = "import importlib.util, sys; print(importlib.util.find_spec(sys.argv[1]).origin)"


def files_of(checkout: Path) -> list[str]:
    """Returns the files that git tracks in a checkout, and those that it would add next."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=checkout,
        capture_output=True,
        check=True,
    )
    names = listed.stdout.decode().split("\0")
    return [name for name in names if (checkout / name).is_file()]


class Tree:
    """The copy. It has one mutant at a time."""

    def __init__(self, checkout: Path, files: Sequence[str], folder: Path) -> None:
        """folder: a new one, which the copy fills."""
        self.folder = folder.resolve()
        for name in files:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkout / name, target)
        self._imports = self.folder / "build" / "import-root"
        root = self._imports / "tandem"
        root.mkdir(parents=True)
        for package in PACKAGES:
            if (self.folder / package).is_dir():
                (root / package).symlink_to(self.folder / package)
        (root / "__init__.py").symlink_to(self.folder / "cluster" / "toplevel" / "__init__.py")

    def environment(self) -> dict[str, str]:
        """The environment of processes that import the copy. PYTHONPATH comes before an editable install, and children
        inherit it."""
        own = {"PYTHONPATH": f"{self._imports}{os.pathsep}{self.folder}"}
        return {**{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}, **own}

    def check_imported(self, mutant: Mutant) -> None:
        """Raises StaleMutant unless a process of this environment imports the mutant's module from the copy."""
        module = mutant.module or "tandem"
        file = self.folder / mutant.file if mutant.module else self.folder / "cluster" / "toplevel" / "__init__.py"
        asked = subprocess.run(
            [sys.executable, "-c", WHERE, module],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        origin = asked.stdout.strip()
        if asked.returncode or Path(origin).resolve() != file:
            raise StaleMutant(f"{module} is imported from {origin or asked.stderr[-300:]}; {file} is the mutant")

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Puts the mutant into the copy meanwhile. StaleMutant when it does not fit."""
        path = self.folder / mutant.file
        original = path.read_text(encoding="utf-8")
        self._write(path, mutant.applied(original))
        try:
            yield
        finally:
            self._write(path, original)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Writes the file, and removes its compiled module: Python knows that by size and second, which two writes may
        share."""
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".py":
            with suppress(FileNotFoundError):
                Path(cache_from_source(path)).unlink()
