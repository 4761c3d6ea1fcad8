"""What a benchmark prints: numbers, how far some of them should get, and what to draw. Read by `tandem bench`."""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 4


def at_most(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": rounded(value), "at_most": limit}


def at_least(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"name": name, "value": rounded(value), "at_least": limit}


def plot(
    title: str, x_label: str, y_label: str, x: Sequence[float | str], series: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """x: numbers for lines, names for groups of bars; series: per name as many numbers as x has."""
    return {"title": title, "x_label": x_label, "y_label": y_label, "x": list(x), "series": dict(series)}


def rounded(value: float) -> float:
    """To DIGITS digits that count."""
    return float(f"{value:.{DIGITS}g}")


def percentile(values: Sequence[float], percent: int) -> float:
    """By linear interpolation; the value itself where there is one."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def print_result(result: Mapping[str, Any]) -> None:
    print(json.dumps(result, indent=2), flush=True)


def print_skipped(why: str) -> None:
    print_result({"skipped": why})
