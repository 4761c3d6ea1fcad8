"""RESULTS.md: a table for each record, what missed its target, and what has run on which GPUs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.report.rows import Peers, Row, number_rows, read_peers, read_records, target_rows

HEAD = """# Results

This page is generated from `results/` by `python -m tests.benchmarks.report`. Do not edit it.
A benchmark's `--record` adds its run to the record of its host kind.

- *now* is the number of the newest run that has it. *run* is the line below the table that tells which run.
- *spread* is the least and the largest repeat, where they are known.
- *before* is the number of the run before that, and the change since.
- Peers ran on the same kind of host. The factor is ours ÷ theirs.

Hosts differ by some percent, and busy CPU cores by much more. A claim is a ratio taken in one run.
The decisions behind the numbers are in [docs/decisions](../../docs/decisions/README.md).
"""
COLUMNS = ("number", "now", "spread", "target", "peer", "before", "run")


def results_page(folder: Path) -> str:
    """The text of RESULTS.md for the records in `folder`."""
    records, peers = read_records(folder), read_peers(folder)
    parts = [HEAD, _missed(records), *(_section(record, peers) for record in records), _coverage(folder)]
    return "\n".join(parts)


def _missed(records: Sequence[Mapping[str, Any]]) -> str:
    rows = [(record, row) for record in records for row in target_rows(record)]
    missed = [(record, row) for record, row in rows if not row.reached]
    lines = [
        "## Targets",
        "",
        f"{len(rows) - len(missed)} of {len(rows)} are reached. These are not:",
        "",
        *_table(
            ("benchmark", "host", "number", "now", "target"),
            [[one["benchmark"], one["host_kind"], row.name, _number(row.value), row.target] for one, row in missed],
        ),
    ]
    return "\n".join([*lines, ""])


def _section(record: Mapping[str, Any], peers: Peers) -> str:
    targets, numbers = target_rows(record), number_rows(record, peers)
    shown = [*targets, *(row for row in numbers if row.peers)]
    others = [row for row in numbers if not row.peers] if shown else []
    lines = [f"## {record['benchmark']} on {record['host_kind']}", "", *_table(COLUMNS, _cells(shown or numbers))]
    if others:
        more = f"<details><summary>{len(others)} more</summary>"
        lines += ["", more, "", *_table(COLUMNS, _cells(others)), "", "</details>"]
    runs = enumerate(reversed(record["runs"]), 1)
    return "\n".join([*lines, "", *(f"{number}. {_run_line(run)}" for number, run in runs), ""])


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row.name,
            _number(row.value),
            f"{_number(row.spread[0])} to {_number(row.spread[1])}" if row.spread else "",
            row.target if row.reached is None else f"{row.target}: {'reached' if row.reached else '**not reached**'}",
            ", ".join(_peer(row.value, *peer) for peer in row.peers),
            _before(row),
            str(row.run),
        ]
        for row in rows
    ]


def _peer(ours: float, name: str, theirs: float) -> str:
    return f"{name}: {_number(theirs)} ({ours / theirs:.2f} ×)" if theirs else f"{name}: {_number(theirs)}"


def _before(row: Row) -> str:
    if not row.before:
        return "" if row.before is None else _number(row.before)
    change = (row.value / row.before - 1) * 100
    return f"{_number(row.before)} ({change:+.1f} %)"


def _run_line(run: Mapping[str, Any]) -> str:
    gpus = run["host"]["gpus"]
    machine = f"{len(gpus)} × {gpus[0]}" if gpus else f"{run['host']['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    when = f"{run['date'] or 'date unknown'} · commit {run['commit']}"
    known = (when, f"`{run['command']}`", machine, versions, run["note"])
    return " · ".join(part for part in known if part)


def _coverage(folder: Path) -> str:
    found = json.loads((folder / "coverage.json").read_text(encoding="utf-8"))
    rows = [
        [one["what"], ", ".join(one["hosts"]) or "**none**", one["date"], one["commit"], one["outcome"]]
        for one in found["coverage"]
    ]
    table = _table(("what", "on", "last", "commit", "outcome"), rows)
    return "\n".join(["## What has run on which GPUs", "", *table, ""])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |" for line in lines]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
