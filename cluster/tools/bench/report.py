"""Output of `tandem bench serve`: a table, JSON and a picture."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.cache.extras import install
from tandem.cluster.errors import MissingPlots, TandemError
from tandem.cluster.tools.bench.measures import Numbers
from tandem.cluster.tools.bench.mixes import Slo
from tandem.cluster.tools.bench.serve import Found, Result

PIPE_WIDTH = 160  # columns of a table that no terminal shows
COLUMNS = (
    "offered /s",
    "served /s",
    "in SLO",
    "tokens/s",
    "TTFT p50",
    "p90",
    "p99",
    "TPOT p50",
    "ITL p50",
    "p90",
    "p99",
    "failed",
    "busy",
)


def one_line(numbers: Numbers) -> str:
    """Formats a load that has just ended."""
    rate = numbers["request_rate"]
    told = "; stopped early" if numbers["stopped_early"] else ""
    return (
        f"{'as traced' if rate is None else f'{rate:.4g} requests/s'}: {numbers['num_prompts']} requests, "
        f"{numbers['slo_attainment']:.1%} in SLO, TTFT p90 {numbers['p90_ttft_ms']:.1f} ms, "
        f"ITL p90 {numbers['p90_itl_ms']:.2f} ms{told}"
    )


def print_report(result: Result, slo: Slo) -> None:
    """Prints a row for each load, by its rate, then the goodput and the reasons to doubt the numbers."""
    table = Table(title=f"times in ms; SLO: {_slo(slo)}", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for run in sorted(result.runs, key=lambda each: each["request_rate"] or 0.0):
        table.add_row(*_cells(run))
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(table)
    if result.found is not None:
        console.print(_goodput(result.found))
    for run in result.runs:
        for warning in run["warnings"]:
            console.print(f"at {run['request_rate'] or 0.0:.4g}/s: {warning}", soft_wrap=True)


def write_json(numbers: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise TandemError(f"--output {path}: cannot be written: {error.strerror}") from None


def check_plots() -> None:
    """Raises MissingPlots when matplotlib is not installed: better before a load than after it."""
    try:
        import matplotlib.figure  # pyright: ignore[reportMissingImports] # noqa: F401
    except ImportError as error:
        raise MissingPlots(f"no plots without matplotlib ({error}): {install('bench')}") from None


def draw_runs(result: Result, slo: Slo, path: Path) -> None:
    """Draws first tokens, gaps and the part of requests in the SLO, over the offered rate."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    ordered = sorted(result.runs, key=lambda each: each["request_rate"] or 0.0)
    rates = [run["request_rate"] or 0.0 for run in ordered]
    answered = [run for run in ordered if run["completed"]]
    figure = Figure(figsize=(8.0, 9.0), dpi=120, layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    for one, name, label, limit in (
        (axes[0], "ttft", "TTFT, ms", slo.ttft_ms),
        (axes[1], "itl", "ITL, ms", slo.gap_ms),
    ):
        for percent in (50, 90, 99):
            times = [run[f"p{percent}_{name}_ms"] for run in answered]
            one.plot([run["request_rate"] or 0.0 for run in answered], times, marker="o", label=f"p{percent}")
        one.axhline(limit, color="black", linewidth=1, linestyle="--", label="SLO")
        one.set(ylabel=label, yscale="log")
        one.legend()
    axes[2].plot(rates, [100 * run["slo_attainment"] for run in ordered], marker="o")
    axes[2].axhline(100 * slo.fraction, color="black", linewidth=1, linestyle="--")
    axes[2].set(xlabel="offered, requests/s", ylabel="in SLO, %", ylim=(0, 102))
    for one in axes:
        one.grid(alpha=0.3)
        if result.found is not None:
            one.axvline(result.found.goodput, color="tab:green", linewidth=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise TandemError(f"--plot {path}: cannot be written: {error}") from None


def _cells(run: Numbers) -> list[str]:
    rate = run["request_rate"]
    times = [run[f"p{percent}_ttft_ms"] for percent in (50, 90, 99)]
    gaps = [run["p50_tpot_ms"], *(run[f"p{percent}_itl_ms"] for percent in (50, 90, 99))]
    return [
        "trace" if rate is None else f"{rate:.4g}",
        "stopped" if run["stopped_early"] else f"{run['steady_request_throughput']:.4g}",
        f"{run['slo_attainment']:.1%}",
        f"{run['steady_output_throughput']:.4g}",
        *(f"{time:.1f}" if run["completed"] else "–" for time in times),
        *(f"{gap:.2f}" if run["completed"] else "–" for gap in gaps),
        str(run["failed"]),
        f"{run['generator_busy']:.2f}",
    ]


def _slo(slo: Slo) -> str:
    return f"{slo.fraction:.0%} with TTFT ≤ {slo.ttft_ms:g} and p90 gap ≤ {slo.gap_ms:g}"


def _goodput(found: Found) -> str:
    if not found.goodput:
        return "goodput: none; no rate kept the SLO" + ("" if found.complete else " within the budget")
    told = f"goodput {found.goodput:.4g} requests/s"
    if found.missed_at is None or found.precision is None:
        ended = "" if found.complete else "; the budget ended the sweep"
        return f"{told} or more: no rate that was tried missed the SLO{ended}"
    told += f" ± {found.precision:.0%}; {found.missed_at:.4g} missed the SLO; {found.arrivals} requests a trial"
    return told if found.complete else f"{told}; the budget ended the sweep"
