"""Output of a benchmark: numbers, how far some of them should get, and what to draw. Read by `bench/`."""

import json
import statistics
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.benchmarks.measured import Measured, rounded
from tests.benchmarks.records import add_run

Numbers = dict[str, Any]


def at_most(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": _shown(value), "at_most": limit}


def at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": _shown(value), "at_least": limit}


def _shown(value: float) -> float:
    return value if isinstance(value, Measured) else rounded(value)


def plot(
    title: str, x_label: str, y_label: str, x: Sequence[float | str], series: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """x: numbers for lines, names for groups of bars; series: per name as many numbers as x has."""
    return {"title": title, "x_label": x_label, "y_label": y_label, "x": list(x), "series": dict(series)}


def percentile(values: Sequence[float], percent: int) -> float:
    """Interpolates linearly; returns the value itself if there is only one."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def print_result(result: Mapping[str, Any], options: Namespace | None = None, *, gpus: int = 0) -> None:
    """Prints the result as JSON, and records the run where --record asks for it.

    options: what benchmark_parser() parsed. gpus: how many GPUs the benchmark uses.
    """
    print(json.dumps(result, indent=2), flush=True)
    if options is not None and options.record is not None:
        add_run(options.benchmark, result, gpus=gpus, commit=options.commit, folder=options.record)


def print_skipped(why: str) -> None:
    print_result({"skipped": why})


def guarded(run: Callable[[], Numbers]) -> Numbers:
    """Returns the numbers of run(), or the error that it raises."""
    try:
        return run()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"error": f"{type(error).__name__}: {error}"[:400]}


def noted(result: Numbers, title: str, run: Callable[[], Numbers]) -> Numbers:
    """Stores the numbers of run() under its title, and prints them on stderr at once, before a user ends the run."""
    began = time.perf_counter()
    result[title] = measured = guarded(run)
    print(f"{title}, after {time.perf_counter() - began:.1f} s: {json.dumps(measured)}", file=sys.stderr, flush=True)
    return measured
