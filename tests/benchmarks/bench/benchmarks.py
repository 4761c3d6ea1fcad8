"""The benchmarks of this checkout, each in a process of its own, and what they print.

A benchmark is a file of tests/benchmarks that can be run. It prints one JSON object, of which these keys are read here:

    skipped   why it could not measure on this machine; then there is nothing else
    targets   [{"name", "value", "at_most" or "at_least"}, …]: its numbers and how far they should get
    plots     [{"title", "x_label", "y_label", "x": […], "series": {name: […]}}, …]: see plots.py

One without targets has every number in its object shown.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.cluster.errors import UsageError

FOLDER = Path(__file__).resolve().parents[1]
ROOT = FOLDER.parents[1]
BENCH_SECONDS = 1800.0
END_SECONDS = 30.0  # for a benchmark that was interrupted to take down what it started
RUNNABLE = 'if __name__ == "__main__":'
PIPE_WIDTH = 160  # columns of a table that no terminal shows


@dataclass(frozen=True)
class Benchmark:
    """Run as the module `tests.benchmarks.name`."""

    name: str

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        tree = ast.parse((FOLDER / f"{self.name}.py").read_text(encoding="utf-8"))
        return (ast.get_docstring(tree) or "").partition("\n")[0]


@dataclass(frozen=True)
class Outcome:
    """result is what the benchmark printed, or {"failed": why}."""

    benchmark: str
    seconds: float
    result: dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number; target and reached are empty and None where it has no target."""

    number: str
    value: float
    target: str = ""
    reached: bool | None = None


def find_benchmarks(names: Sequence[str]) -> list[Benchmark]:
    """Returns the named benchmarks, or all. Raises UsageError."""
    found = {
        path.stem: Benchmark(path.stem)
        for path in sorted(FOLDER.glob("*.py"))
        if RUNNABLE in path.read_text(encoding="utf-8")
    }
    unknown = [name for name in names if name not in found]
    if unknown:
        raise UsageError(f"NAMES has {', '.join(unknown)}; {FOLDER} has {', '.join(found) or 'none'}")
    return [found[name] for name in names or found]


def run_benchmark(benchmark: Benchmark, seconds: float = BENCH_SECONDS) -> Outcome:
    """Runs it to its end, for at most `seconds`; its stderr is this process's."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.benchmarks.{benchmark.name}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that all it starts can be ended together
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
        result = _result(printed, process.returncode)
    except subprocess.TimeoutExpired:
        result = {"failed": f"still ran after {seconds:g} s"}
    finally:
        _end(process)
    return Outcome(benchmark.name, round(time.monotonic() - began, 1), result)


def write_outcome(outcome: Outcome, folder: Path) -> None:
    """The result as NAME.json in `folder`, which is made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{outcome.benchmark}.json").write_text(json.dumps(outcome.result, indent=2) + "\n", encoding="utf-8")


def rows_of(result: dict[str, Any]) -> list[Figure]:
    """Returns a row for each target, or for every number by its dotted name."""
    if "targets" not in result:
        return [Figure(name, value) for name, value in _numbers(result)]
    return [_row(target) for target in result["targets"]]


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    table = Table(title="benchmarks", title_justify="left")
    for column in ("benchmark", "number", "value", "target", "reached"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for outcome in outcomes:
        for word in ("skipped", "failed"):
            if word in outcome.result:
                table.add_row(outcome.benchmark, f"{word}: {outcome.result[word]}")
                break
        else:
            for row in rows_of(outcome.result):
                reached = "" if row.reached is None else "yes" if row.reached else "no"
                table.add_row(outcome.benchmark, row.number, f"{row.value:.4g}", row.target, reached)
        table.add_section()
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)


def _result(printed: str, code: int) -> dict[str, Any]:
    """The last object that begins a line: libraries write lines of their own before it."""
    if code:
        return {"failed": f"ended with exit code {code}"}
    lines = printed.splitlines(keepends=True)
    for begin in reversed(range(len(lines))):
        if lines[begin].startswith("{"):
            with suppress(ValueError):
                result, _ = json.JSONDecoder().raw_decode("".join(lines[begin:]))
                return result
    return {"failed": f"printed no JSON object but {printed[-200:]!r}"}


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what still runs of a benchmark: politely first, so that a cluster leaves nothing behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _row(target: dict[str, Any]) -> Figure:
    name, value = target["name"], target["value"]
    if "at_most" in target:
        return Figure(name, value, f"≤ {target['at_most']:g}", value <= target["at_most"])
    return Figure(name, value, f"≥ {target['at_least']:g}", value >= target["at_least"])


def _numbers(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{prefix}.{key}" if prefix else key)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, value
