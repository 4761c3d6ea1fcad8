"""Writes RESULTS.md from the records of benchmarks, and the index of decision records; prints whole records.

python -m tests.benchmarks.report           writes both
python -m tests.benchmarks.report --check   fails where one is stale
python -m tests.benchmarks.report steps     prints all numbers of a benchmark, on all hosts
python -m tests.benchmarks.report targets   prints the targets that are not reached
python -m tests.benchmarks.report coverage  prints what has run on which GPUs
"""

import argparse
import textwrap
from pathlib import Path

from tests.benchmarks.records import RESULTS
from tests.benchmarks.report.decisions import index_of
from tests.benchmarks.report.headlines import headlines_page
from tests.benchmarks.report.pages import printed
from tests.benchmarks.report.rows import read_records

ROOT = Path(__file__).resolve().parents[3]
COMMAND = "python -m tests.benchmarks.report"


def pages(results: Path, decisions: Path) -> dict[Path, str]:
    """Returns the text of each generated page, by its path."""
    return {
        results.with_name("RESULTS.md"): headlines_page(results),
        decisions / "README.md": index_of(decisions),
    }


def stale(results: Path, decisions: Path) -> list[Path]:
    """Generated pages that do not hold what they should, or are missing."""
    wanted = pages(results, decisions)
    return [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main(results: Path = RESULTS, decisions: Path = ROOT / "docs" / "decisions") -> None:
    names = ", ".join(dict.fromkeys(record["benchmark"] for record in read_records(results)))
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=textwrap.fill(f"benchmarks: {names}", 80),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="print this instead of writing: a benchmark, `targets` or `coverage`")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    options = parser.parse_args()
    if options.name:
        try:
            print(printed(results, options.name), end="")
        except ValueError as error:
            parser.error(str(error))
    elif not options.check:
        for path, text in pages(results, decisions).items():
            path.write_text(text, encoding="utf-8")
    elif wrong := stale(results, decisions):
        raise SystemExit(f"stale: {', '.join(map(str, wrong))}; run `{COMMAND}`")


if __name__ == "__main__":
    main()
