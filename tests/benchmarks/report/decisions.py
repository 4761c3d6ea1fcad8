"""The index of decision records, by area.

A record's first line is `# NNNN: title`, its second `area · date · benchmark`. It asks a question, and says what was
decided and what would reopen it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEAD = """# Decisions

What was tried, with its numbers, and what was decided. Read a record before you try the same again.
Code that looks odd cites its record. This index is generated: `python -m tests.benchmarks.report`.

A new record takes the next number. It has 10 to 20 lines: the question, the options with their numbers, the decision,
and what would reopen it. A record that no longer holds is not deleted. Its decision names the record that replaced it.
Terms are those of ARCHITECTURE.md. In tables `a → b` is before → after, and `8B` is Qwen3-8B. `C` is the rate of a
device copy, `F` that of a large product, and `W` that of one large copy to a peer GPU, all of the same run. The log
that the first records were distilled from is in git history (`tests/benchmarks/LOG.md`, up to 2026-11-22).
"""
PARTS = ("**Question.**", "**Decision.**", "**Reopen when**")
MOST_LINES = 24


@dataclass(frozen=True)
class Decision:
    """file: its name in the folder of records."""

    number: int
    title: str
    area: str
    date: str
    file: str


def read_decision(path: Path) -> Decision:
    """Raises ValueError that names the file where it is no record."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    title = re.fullmatch(r"# (\d{4}): (.+)", lines[0]) if lines else None
    about = lines[1].split(" · ") if len(lines) > 1 else []
    missing = [part for part in PARTS if not any(part in line for line in lines)]
    if title is None or not path.name.startswith(f"{title[1]}-") or len(about) != 3:
        accepted = "it must begin with '# NNNN: title' and 'area · date · benchmark'"
        raise ValueError(f"{path.name} begins with {lines[:2]}; {accepted}")
    if missing or len(lines) > MOST_LINES:
        raise ValueError(f"{path.name} has {len(lines)} lines (at most {MOST_LINES}) and lacks {missing}")
    return Decision(int(title[1]), title[2], about[0], about[1], path.name)


def index_of(folder: Path) -> str:
    """The text of the index of the records in `folder`. Raises ValueError where their numbers have a gap."""
    decisions = [read_decision(path) for path in sorted(folder.glob("[0-9]*.md"))]
    if [one.number for one in decisions] != list(range(1, len(decisions) + 1)):
        raise ValueError(f"records are numbered {[one.number for one in decisions]}; they must be 1, 2, 3, …")
    areas = dict.fromkeys(one.area for one in decisions)
    sections = [_section(area, [one for one in decisions if one.area == area]) for area in areas]
    return "\n".join([HEAD, *sections])


def _section(area: str, decisions: Sequence[Decision]) -> str:
    rows = [f"| [{one.number:04}]({one.file}) | {one.title} | {one.date} |" for one in decisions]
    return "\n".join(
        [f"## {area[0].upper()}{area[1:]}", "", "| record | decision | date |", "|---|---|---|", *rows, ""]
    )
