"""`make mutants`: takes one protection after another out of a copy, and looks whether a test notices.

python -m tests.mutants [NAME …] [--list] [--processes N]

Prints a line for each: killed, and by which test; SURVIVED; or stale, where the list no longer fits the product or a
test fails without a mutant. Ends with 1 unless all are killed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.judgement import Judgement, Outcome, judge, unchanged_failures
from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS
from tests.mutants.tree import Tree, files_of

CHECKOUT = Path(__file__).resolve().parents[2]


class Copies:
    """One copy of the checkout for each mutant that is judged at a time."""

    def __init__(self, checkout: Path, files: Sequence[str], folder: Path, count: int) -> None:
        self._free: SimpleQueue[Tree] = SimpleQueue()
        for number in range(count):
            self._free.put(Tree(checkout, files, folder / str(number)))

    @contextmanager
    def one(self) -> Iterator[Tree]:
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


def run(mutants: Sequence[Mutant], checkout: Path, files: Sequence[str], processes: int = 2) -> Iterator[Judgement]:
    """Runs the tests of all mutants on unchanged copies, then each mutant with its own. Yields judgements as they
    come."""
    with (
        tempfile.TemporaryDirectory(prefix="tandem-mutants-") as folder,
        ThreadPoolExecutor(processes) as pool,
    ):
        copies = Copies(checkout, files, Path(folder), processes)

        def failures(tests: Sequence[str]) -> dict[str, str]:
            with copies.one() as tree:
                return unchanged_failures(tests, tree)

        def one(mutant: Mutant) -> Judgement:
            for test in mutant.tests:
                if test in stale:
                    return Judgement(mutant, Outcome.STALE, stale[test])
            with copies.one() as tree:
                return judge(mutant, tree)

        stale: dict[str, str] = {}
        for found in pool.map(failures, shares(mutants, processes)):
            stale |= found
        yield from pool.map(one, mutants)


def shares(mutants: Sequence[Mutant], count: int) -> list[list[str]]:
    """Splits all their tests into up to `count` parts. Tests of a file stay together, because they share fixtures."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    files = sorted({test.partition("::")[0] for test in tests})
    parts = [[test for test in tests if test.partition("::")[0] in files[part::count]] for part in range(count)]
    return [part for part in parts if part]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all when left out")
    parser.add_argument("--list", action="store_true", help="print what each takes out and why it matters")
    parser.add_argument("--processes", type=int, default=2, help="mutants at a time")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - {mutant.name for mutant in MUTANTS})
    if unknown:
        parser.error(f"{', '.join(unknown)}: there is no such mutant; --list prints them")
    mutants = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.file}\n    {mutant.reason}")
        return 0
    began, judged = time.monotonic(), []
    for judgement in run(mutants, CHECKOUT, files_of(CHECKOUT), options.processes):
        print(judgement, flush=True)
        judged.append(judgement)
    killed = sum(judgement.outcome is Outcome.KILLED for judgement in judged)
    print(f"{killed} of {len(mutants)} killed in {time.monotonic() - began:.0f} s")
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
