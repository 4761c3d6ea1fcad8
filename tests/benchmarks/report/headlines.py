"""RESULTS.md: the numbers that a reader compares first, each beside its target, its limit and its peers.

The page is one table with notes below. `headlines.json` among the results chooses its rows. Each section has a title, a
unit, a text that defines its limit, and rows of one record:

    what        the row's words
    number      a number of the record; without it the row shows the value of its target
    to_limit    a number that is a ratio to what the device could do, or
    limit       a number that `number` is divided by
    target      a target of the record, which holds for the ratio `to_limit` where the row has one, else for the number
    record      the record of this row, where it is another than the section's
"""

import json
import string
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.report.rows import Peers, Row, number_rows, read_peers, read_records, target_rows
from tests.benchmarks.report.tables import number, peers_cell, table, target_cell

HEAD = """# Results

The numbers to compare tandem by: what it reaches, its target, how near that is to what the hardware allows, and peers.
`python -m tests.benchmarks.report` makes this page from `results/`. Do not edit it.

- *now*: the newest measurement; in brackets the smallest and the largest repeat. For goodput the brackets hold the
  highest rate that kept the service level, and the lowest that did not.
- *÷ limit*: the ratio to what the device could do. The notes below the table define each limit.
- *peer*: its number on the same kind of host, and ours ÷ theirs.
"""
COLUMNS = ("", "number", "now", "÷ limit", "target", "peer", "run")
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
    runs: list[str] = []
    rows = [row for section in sections for row in _rows(section, records, runs)]
    notes = [_wrapped(f"- **{section['title']}**: {section['text']}", "  ") for section in sections]
    legend = _wrapped("Runs: " + "; ".join(f"{_letter(number)}: {run}" for number, run in enumerate(runs)) + ".")
    return "\n".join([HEAD, *table(COLUMNS, rows), "", *notes, "", legend, "", _rest(found), ""])


def _read(record: Mapping[str, Any], peers: Peers) -> _Record:
    kind = record["host_kind"]
    runs = [f"{kind}, {run['date'] or 'date unknown'}, {run['commit']}" for run in reversed(record["runs"])]
    numbers = {row.name: row for row in number_rows(record, peers)}
    return _Record(f"{record['benchmark']}-{kind}", numbers, {row.name: row for row in target_rows(record)}, runs)


def _rows(section: Mapping[str, Any], records: Mapping[str, _Record], runs: list[str]) -> Iterator[list[str]]:
    """The table's rows of one section, of which the first has its title. Appends new runs to `runs`."""
    for place, line in enumerate(section["rows"]):
        title = "" if place else f"**{section['title']}**, {section['unit']}"
        yield [title, *_cells(line, records[line.get("record", section["record"])], runs)]


def _cells(line: Mapping[str, str], record: _Record, runs: list[str]) -> list[str]:
    target = record.target(line["target"]) if "target" in line else None
    row = record.number(line["number"]) if "number" in line else record.target(line["target"])
    ratio = record.number(line["to_limit"]).value if "to_limit" in line else None
    judged = row.value if ratio is None else ratio  # by the target
    if "limit" in line:
        ratio = row.value / record.number(line["limit"]).value
    run = record.runs[row.run - 1]
    if run not in runs:
        runs.append(run)
    return [
        line["what"],
        number(row.value) + (f" ({number(row.spread[0])} to {number(row.spread[1])})" if row.spread else ""),
        "" if ratio is None else f"{ratio:.2f}",
        target_cell(target.target if target else None, judged),
        peers_cell(row.value, row.peers),
        _letter(runs.index(run)),
    ]


def _letter(run: int) -> str:
    return string.ascii_lowercase[run]


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _rest(records: Sequence[Mapping[str, Any]]) -> str:
    """Reports how many targets are reached, and the commands that print everything else."""
    targets = [row for record in records for row in target_rows(record)]
    reached = sum(not row.missed for row in targets)
    command = "`python -m tests.benchmarks.report targets`"
    return _wrapped(
        f"{reached} of {len(targets)} targets are reached. {command} prints the others, `report NAME` all numbers of a "
        "benchmark, `report --help` their names, and `report coverage` which parts have run on which GPUs. Hosts "
        "differ by some percent, and busy CPU cores by much more. So a claim about speed is a ratio of two numbers of "
        "one run."
    )
