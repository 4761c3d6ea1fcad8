"""Prints for `python -m tests.benchmarks.report NAME` all numbers of a benchmark, missed targets, or GPU coverage."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.report.rows import Peers, Row, number_rows, read_peers, read_records, target_rows
from tests.benchmarks.report.tables import number, peers_cell, table, target_cell

TARGETS, COVERAGE = "targets", "coverage"
COLUMNS = ("number", "now", "spread", "target", "peer", "before", "run")


def printed(folder: Path, name: str) -> str:
    """The text for `name`: a benchmark, TARGETS or COVERAGE. Raises ValueError with the names there are."""
    records = read_records(folder)
    if name == TARGETS:
        return _missed(records)
    if name == COVERAGE:
        return _coverage(folder)
    named = [record for record in records if record["benchmark"] == name]
    if not named:
        accepted = ", ".join([*dict.fromkeys(record["benchmark"] for record in records), TARGETS, COVERAGE])
        raise ValueError(f"no benchmark is named {name!r}; it must be one of {accepted}")
    return "\n".join(_record(record, read_peers(folder)) for record in named)


def _missed(records: Sequence[Mapping[str, Any]]) -> str:
    rows = [(record, row) for record in records for row in target_rows(record)]
    missed = [(record, row) for record, row in rows if row.missed]
    lines = [
        f"{len(rows) - len(missed)} of {len(rows)} targets are reached. These are not:",
        "",
        *table(
            ("benchmark", "host", "number", "now", "target"),
            [[one["benchmark"], one["host_kind"], row.name, number(row.value), str(row.target)] for one, row in missed],
        ),
    ]
    return "\n".join([*lines, ""])


def _record(record: Mapping[str, Any], peers: Peers) -> str:
    """Targets, then numbers, each as its newest run has it; then the runs, which the last column counts."""
    rows = [*target_rows(record), *number_rows(record, peers)]
    runs = enumerate(reversed(record["runs"]), 1)
    head = f"## {record['benchmark']} on {record['host_kind']}"
    lines = [head, "", *table(COLUMNS, [_cells(row) for row in rows])]
    return "\n".join([*lines, "", *(f"{which}. {_run_line(run)}" for which, run in runs), ""])


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        number(row.value),
        f"{number(row.spread[0])} to {number(row.spread[1])}" if row.spread else "",
        target_cell(row.target, row.value),
        peers_cell(row.value, row.peers),
        _before(row),
        str(row.run),
    ]


def _before(row: Row) -> str:
    if not row.before:
        return "" if row.before is None else number(row.before)
    change = (row.value / row.before - 1) * 100
    return f"{number(row.before)} ({change:+.1f} %)"


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
    return "\n".join([*table(("what", "on", "last", "commit", "outcome"), rows), ""])
