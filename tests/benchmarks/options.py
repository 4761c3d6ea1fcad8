"""Options that benchmarks share: what of them to run, for how long, and whether to record it.

Options of several values take them with spaces or commas: `--rows 1 8 64`, `--rows 1,8,64`.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.benchmarks.records import RESULTS

Case = TypeVar("Case")


def benchmark_parser(file: str, summary: str | None) -> argparse.ArgumentParser:
    """The parser of the benchmark in `file`, with the options that all have: --record, --commit."""
    name = Path(file).stem
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks.{name}",
        description=summary,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(benchmark=name)
    parser.add_argument(
        "--record",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FOLDER",
        help="add this run to the record of its host kind, in tests/benchmarks/results or FOLDER",
    )
    parser.add_argument("--commit", help="commit to record where the checkout has no git")
    return parser


def add_seconds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, help="budget: no case or round begins later than that")


def add_list(
    parser: argparse.ArgumentParser,
    flag: str,
    kind: Callable[[str], Any] = str,
    *,
    default: Sequence[Any] | None = None,
    choices: Sequence[Any] | None = None,
    nargs: str = "+",
    help: str | None = None,
) -> None:
    """An option of several values, with spaces or commas between them."""

    def values(text: str) -> list[Any]:
        try:
            found = [kind(part) for part in text.split(",") if part]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        wrong = [value for value in found if choices is not None and value not in choices]
        if wrong or not found:
            accepted = ", ".join(map(str, choices)) if choices is not None else "one value or more"
            raise argparse.ArgumentTypeError(f"{text!r} was given; it must be {accepted}")
        return found

    parser.add_argument(flag, nargs=nargs, type=values, action=_Flat, default=default, help=help)


class _Flat(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, [value for part in values for value in part])


class Budget:
    """Seconds for all cases and rounds of a benchmark, from its making on; None has no end."""

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds

    @property
    def is_spent(self) -> bool:
        return self._ends is not None and time.monotonic() > self._ends

    def within(self, cases: Iterable[Case], least: int = 1) -> Iterator[Case]:
        """The cases that may still begin; the first `least` of them always."""
        for number, case in enumerate(cases):
            if number >= least and self.is_spent:
                return
            yield case
