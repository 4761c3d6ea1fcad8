"""RESULTS.md: the numbers that a reader compares first, each beside its target, its limit and its peers.

`headlines.json` among the results says which. Each section has a title, a text and rows of one record:

    what        the row's words
    number      a number of the record; without it the row shows the value of its target
    to_limit    a number that is a ratio to what the device could do, or
    limit       a number that `number` is divided by
    target      a target of the record, which holds for the ratio `to_limit` where the row has one, else for the number
    record      the record of this row, where it is another than the section's
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.report.rows import Peers, Row, number_rows, read_peers, read_records, target_rows
from tests.benchmarks.report.tables import number, peers_cell, table, target_cell

HEAD = """# Results

What tandem reaches, beside its targets, what the hardware allows, and peers. `python -m tests.benchmarks.report` makes
this page from `results/`. Do not edit it. `python -m tests.benchmarks.report NAME` prints all numbers of a benchmark.

- *now*: the number in the newest run that has it; in brackets the least and the largest repeat. A sweep's brackets are
  the last rate that kept the limits, and the first that did not.
- *run*: the kind of host, date and commit of that run.
- *÷ limit*: a ratio to what the device could do. Each section says what its limit is.
- *peer*: the number on the same kind of host, and ours ÷ theirs.

Hosts differ by some percent, and busy CPU cores by much more, so a claim is a ratio taken in one run.
"""
COLUMNS = ("number", "now", "÷ limit", "target", "peer", "run")
WIDTH = 120


@dataclass(frozen=True)
class _Record:
    """The rows of one record by name, and where and when each run was."""

    name: str
    numbers: Mapping[str, Row]
    targets: Mapping[str, Row]
    runs: Sequence[str]  # the newest first

    def number(self, name: str) -> Row:
        return self._find(self.numbers, "number", name)

    def target(self, name: str) -> Row:
        return self._find(self.targets, "target", name)

    def _find(self, rows: Mapping[str, Row], kind: str, name: str) -> Row:
        if name not in rows:
            raise ValueError(f"headlines.json names the {kind} {name!r}, which {self.name} lacks; it has {[*rows]}")
        return rows[name]


def headlines_page(folder: Path) -> str:
    """The text of RESULTS.md for the records in `folder`. Raises ValueError where headlines.json names no number."""
    found, peers = read_records(folder), read_peers(folder)
    records = {record.name: record for record in (_read(one, peers) for one in found)}
    sections = json.loads((folder / "headlines.json").read_text(encoding="utf-8"))["sections"]
    parts = [HEAD, *(_section(section, records) for section in sections), _rest(folder, found)]
    return "\n".join(parts)


def _read(record: Mapping[str, Any], peers: Peers) -> _Record:
    kind = record["host_kind"]
    runs = [f"{kind}, {run['date'] or 'date unknown'}, {run['commit']}" for run in reversed(record["runs"])]
    numbers = {row.name: row for row in number_rows(record, peers)}
    return _Record(f"{record['benchmark']}-{kind}", numbers, {row.name: row for row in target_rows(record)}, runs)


def _section(section: Mapping[str, Any], records: Mapping[str, _Record]) -> str:
    rows = [_cells(row, records[row.get("record", section["record"])]) for row in section["rows"]]
    return "\n".join([f"## {section['title']}", "", _wrapped(section["text"]), "", *table(COLUMNS, rows), ""])


def _cells(line: Mapping[str, str], record: _Record) -> list[str]:
    target = record.target(line["target"]) if "target" in line else None
    row = record.number(line["number"]) if "number" in line else record.target(line["target"])
    ratio = record.number(line["to_limit"]).value if "to_limit" in line else None
    judged = row.value if ratio is None else ratio  # by the target
    if "limit" in line:
        ratio = row.value / record.number(line["limit"]).value
    return [
        line["what"],
        number(row.value) + (f" ({number(row.spread[0])} to {number(row.spread[1])})" if row.spread else ""),
        "" if ratio is None else f"{ratio:.2f}",
        target_cell(target.target if target else None, judged),
        peers_cell(row.value, row.peers),
        record.runs[row.run - 1],
    ]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _rest(folder: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """What else `python -m tests.benchmarks.report` prints."""
    targets = [row for record in records for row in target_rows(record)]
    reached = sum(not row.missed for row in targets)
    names = ", ".join(dict.fromkeys(record["benchmark"] for record in records))
    covered = json.loads((folder / "coverage.json").read_text(encoding="utf-8"))["coverage"]
    lines = [
        "## All numbers",
        "",
        f"{reached} of {len(targets)} targets are reached. The others: `python -m tests.benchmarks.report targets`.",
        _wrapped(f"`NAME` is one of {names}."),
        "",
        "## What has run on which GPUs",
        "",
        f"{len(covered)} entries: tests and loads, with hosts, dates, commits and outcomes.",
        "`python -m tests.benchmarks.report coverage` prints them.",
    ]
    return "\n".join([*lines, ""])
