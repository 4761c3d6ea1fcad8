"""One protection taken out of the product."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A change of one place, and the tests that have to notice it."""

    name: str
    file: str  # of the product, from the checkout's root
    find: str  # stands in the file exactly once
    replace: str
    reason: str  # in one sentence: what is protected, and what a user would see without it
    tests: tuple[str, ...]  # pytest's names of tests or files, the narrowest that notice
    hangs: bool = False  # whether its tests never end: then that counts as noticed

    def applied(self, text: str) -> str:
        """Returns the file's text with the change. StaleMutant unless it fits exactly one place."""
        count = text.count(self.find)
        if count != 1:
            raise StaleMutant(f"{self.file} has the text {count} times; it must be there once")
        return text.replace(self.find, self.replace)

    @property
    def test_files(self) -> frozenset[str]:
        return frozenset(test.partition("::")[0] for test in self.tests)

    @property
    def module(self) -> str | None:
        """Returns the import name of the file; None if it is no Python."""
        path = Path(self.file)
        return ".".join(("tandem", *path.with_suffix("").parts)) if path.suffix == ".py" else None


class StaleMutant(Exception):
    """The list of mutants is out of date; the text says why."""
