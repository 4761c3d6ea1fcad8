"""Pictures of what benchmarks print, by matplotlib, which comes with the extra `bench`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.cache.extras import install
from tandem.cluster.errors import MissingPlots
from tests.benchmarks.bench.benchmarks import Outcome

INCHES = (8.0, 4.5)
DPI = 120
BAR_SHARE = 0.8  # of the space between two neighbours on the x axis


def draw_plots(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """A PNG for every plot of every result, and targets.png over all that has a target; what was written.

    A plot has "x" (numbers: lines over a logarithmic axis; names: groups of bars) and "series", per name as many
    numbers as x has. Raises MissingPlots when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingPlots(f"no plots without matplotlib ({error}): {install('bench')}") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for outcome in outcomes:
        for plot in outcome.result.get("plots", ()):
            figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
            _draw(figure.subplots(), plot)
            written.append(folder / f"{outcome.benchmark}-{_slug(plot['title'])}.png")
            figure.savefig(written[-1])
    shares = shares_of_targets(outcomes)
    if shares:
        figure = Figure(figsize=(INCHES[0], 1.0 + 0.3 * len(shares)), dpi=DPI, layout="constrained")
        _draw_shares(figure.subplots(), shares)
        written.append(folder / "targets.png")
        figure.savefig(written[-1])
    return written


def shares_of_targets(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Per number with a target: value ÷ target, or target ÷ value where more is better. At most 1: it is reached."""
    shares = {}
    for outcome in outcomes:
        for target in outcome.result.get("targets", ()):
            value, name = target["value"], f"{outcome.benchmark}: {target['name']}"
            parts = (value, target["at_most"]) if "at_most" in target else (target["at_least"], value)
            shares[name] = max(0.0, parts[0] / parts[1]) if parts[1] else float(parts[0] > 0) * 2
    return shares


def _draw(axes: Any, plot: dict[str, Any]) -> None:
    x, series = plot["x"], plot["series"]
    if all(isinstance(value, int | float) for value in x):
        for name, values in series.items():
            axes.plot(x, values, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.set_ylim(bottom=0)
    else:
        width = BAR_SHARE / max(1, len(series))
        for number, (name, values) in enumerate(series.items()):
            offset = (number - (len(series) - 1) / 2) * width
            bars = axes.bar([place + offset for place in range(len(x))], values, width, label=name)
            axes.bar_label(bars, fmt="%.3g", fontsize=7)
        axes.set_xticks(range(len(x)), x)
    axes.set(title=plot["title"], xlabel=plot["x_label"], ylabel=plot["y_label"])
    axes.grid(axis="y", alpha=0.3)
    if len(series) > 1:
        axes.legend()


def _draw_shares(axes: Any, shares: dict[str, float]) -> None:
    names = list(shares)[::-1]
    colours = ["tab:green" if shares[name] <= 1 else "tab:red" for name in names]
    axes.barh(names, [shares[name] for name in names], color=colours)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set(title="how far from the target: left of the line it is reached", xlabel="value ÷ target, or its inverse")
    axes.tick_params(axis="y", labelsize=7)


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
