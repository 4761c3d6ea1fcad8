"""Rows of a results table: each number as its newest run has it, beside target, peers and the run before."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Peers = Mapping[tuple[str, str], Sequence[tuple[str, float]]]  # by benchmark and number: name and value
NO_RECORDS = ("peers", "coverage", "headlines")  # files among the records that are none
Measured = tuple[int, dict[str, Any]]  # which run, counted from 1 for the newest; what it has


@dataclass(frozen=True)
class Target:
    """The limit of a number: at most or at least so much."""

    limit: float
    at_most: bool

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:.4g}"

    def reached(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit


@dataclass(frozen=True)
class Row:
    """One number. run: see Measured. before: the number in the newest earlier run that has it."""

    name: str
    value: float
    spread: tuple[float, float] | None
    target: Target | None
    peers: Sequence[tuple[str, float]]
    before: float | None
    run: int

    @property
    def missed(self) -> bool:
        return self.target is not None and not self.target.reached(self.value)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of all benchmarks, in the order of their files' names."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.stem not in NO_RECORDS]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def read_peers(folder: Path) -> Peers:
    found: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for one in json.loads((folder / "peers.json").read_text(encoding="utf-8"))["peers"]:
        found.setdefault((one["benchmark"], one["number"]), []).append((one["peer"], one["value"]))
    return found


def target_rows(record: Mapping[str, Any]) -> list[Row]:
    """Numbers with a target; as they were named when the target was set."""
    return [_target_row(name, found) for name, found in _newest_first(record, _targets_of).items()]


def number_rows(record: Mapping[str, Any], peers: Peers) -> list[Row]:
    benchmark = record["benchmark"]
    rows = []
    for name, found in _newest_first(record, lambda run: run["numbers"].items()).items():
        number, measured = found[0]
        of_run = [(one["peer"], one["value"]) for one in _run(record, number)["peers"] if one["number"] == name]
        spread = tuple(measured["spread"]) if measured["spread"] else None
        before = found[1][1]["median"] if len(found) > 1 else None
        theirs = of_run or peers.get((benchmark, name), ())
        rows.append(Row(name, measured["median"], spread, None, theirs, before, number))
    return sorted(rows, key=lambda row: _natural(row.name))


def _natural(name: str) -> list[tuple[int, str]]:
    """An order in which 8 comes before 16."""
    return [(int(part or 0), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _run(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    return record["runs"][-number]


def _newest_first(record: Mapping[str, Any], named: Any) -> dict[str, list[Measured]]:
    """Returns by name what each run that has it measured, the newest run first."""
    found: dict[str, list[Measured]] = {}
    for number, run in enumerate(reversed(record["runs"]), 1):
        for name, measured in named(run):
            found.setdefault(name, []).append((number, measured))
    return found


def _targets_of(run: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for target in run["targets"]:
        yield target["name"], target


def _target_row(name: str, found: Sequence[Measured]) -> Row:
    number, target = found[0]
    value, before = target["value"], found[1][1]["value"] if len(found) > 1 else None
    limit = "at_most" if "at_most" in target else "at_least"
    spread = tuple(target["spread"]) if target.get("spread") else None
    return Row(name, value, spread, Target(target[limit], limit == "at_most"), (), before, number)
