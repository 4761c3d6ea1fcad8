"""A picture of the Grafana board, from recorded scrapes: `python -m tests.board.draw SCRAPES PICTURE`.

Each panel of deploy/grafana/tandem.json is drawn from its own expressions. tests/board/record.py records.
"""

import argparse
import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from PIL import Image  # matplotlib needs it, too

from tandem.cluster.cli.samples import Samples
from tests.support.promql import Labels, Query, Recording

BOARD = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "tandem.json"
WINDOW = 6.0  # seconds that rates look back
COLUMNS = 4
BACK, PANEL, INK, FAINT = "#111217", "#181b1f", "#d0d1d5", "#2c3036"
SCALES = {"Bps": 1 << 20, "bytes": 1 << 20}
COLORS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#e02f44", "#b877d9", "#37872d", "#8ab8ff")


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that have expressions."""
    return [panel for panel in board["panels"] if panel.get("targets")]


def recording(file: Path) -> Recording:
    scrapes = [json.loads(line) for line in file.read_text().splitlines()]
    return Recording([one["at"] for one in scrapes], [Samples(one["text"]) for one in scrapes], WINDOW)


def draw(axes: Axes, panel: dict[str, Any], recorded: Recording) -> None:
    """One panel, with a line for each series of each expression."""
    lines: dict[str, tuple[list[float], list[float]]] = {}
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        query = Query(target["expr"])
        for time in recorded.times:
            for labels, value in query.at(recorded, time).items():
                if math.isfinite(value):
                    times, values = lines.setdefault(_legend(target["legendFormat"], labels), ([], []))
                    times.append(time)
                    values.append(value / SCALES.get(unit, 1))
    for color, (name, (times, values)) in zip(COLORS * 3, lines.items(), strict=False):
        axes.plot(times, values, color=color, linewidth=0.9, label=name)
    axes.set_title(panel["title"], color=INK, fontsize=8, loc="left")
    axes.set_facecolor(PANEL)
    axes.tick_params(colors=INK, labelsize=6, length=0)
    axes.grid(color=FAINT, linewidth=0.5)
    axes.set_xlim(recorded.times[0], recorded.times[-1])
    axes.set_ylim(0, 1.4 * max((max(values) for _, values in lines.values()), default=1) or 1)  # the legend is above
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, unit)))
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    if lines:
        axes.legend(fontsize=5.5, facecolor=PANEL, edgecolor=FAINT, labelcolor=INK, ncols=2, loc="upper left")


def _legend(form: str, labels: Labels) -> str:
    for name, value in labels:
        form = form.replace("{{" + name + "}}", value)
    return form


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "Bps":
        return f"{value:.3g} MiB/s"
    if unit == "bytes":
        return f"{value:.0f} MiB"
    return f"{value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scrapes", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    recorded, shown = recording(options.scrapes), panels(json.loads(BOARD.read_text()))
    rows = math.ceil(len(shown) / COLUMNS)
    figure, grid = plt.subplots(rows, COLUMNS, figsize=(3.4 * COLUMNS, 1.9 * rows), layout="constrained")
    figure.set_facecolor(BACK)
    for axes, panel in zip(grid.flat, shown, strict=False):
        draw(axes, panel, recorded)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100, facecolor=BACK)
    Image.open(drawn).convert("RGB").quantize(200, kmeans=1).save(options.picture, optimize=True)


if __name__ == "__main__":
    main()
