"""Measures the gate, checks and tests: minutes, minutes of all CPUs, the slowest tests and files.

Runs `.ci/run` and prints JSON. Its own output goes to standard error. With --junit it reads the tests of a run before.
CPU minutes are those of processes that their parents waited for: of what Ray starts in the background they lack a part.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.benchmarks.measured import rounded
from tests.benchmarks.options import benchmark_parser
from tests.benchmarks.results import at_most, print_result

ROOT = Path(__file__).resolve().parents[2]
MOST_MINUTES = 12.0  # on two quiet cores
SHOWN = 20


def run_gate(junit: Path) -> dict[str, float]:
    """Raises SystemExit where the gate fails. junit: where it writes what each test took."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([ROOT / ".ci" / "run", f"--junitxml={junit}"], stdout=sys.stderr, check=False)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"the gate fails with exit status {done.returncode}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"minutes": rounded(wall / 60), "cpu_minutes": rounded(cpu / 60)}


def read_junit(path: Path) -> dict[str, Any]:
    """Returns the number of tests, and the seconds of the slowest tests and of the slowest files."""
    tests: defaultdict[str, float] = defaultdict(float)
    files: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(path).iter("testcase"):
        seconds, file = float(case.get("time", "0")), file_of(case.get("classname", ""))
        tests[f"{file}::{case.get('name')}"] += seconds
        files[file] += seconds
    return {
        "tests": len(tests),
        "slowest_tests": slowest(tests),
        "slowest_files": slowest(files),
    }


def slowest(seconds: Mapping[str, float]) -> list[tuple[float, str]]:
    found = sorted(((took, name) for name, took in seconds.items()), reverse=True)
    return [(rounded(took), name) for took, name in found[:SHOWN]]


def file_of(classname: str) -> str:
    """tests/a/test_b.py, also of a class within it."""
    parts = classname.split(".")
    last = next((place for place, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return f"{'/'.join(parts[: last + 1])}.py"


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--junit", type=Path, help="what pytest's --junitxml wrote: nothing is run")
    options = parser.parse_args()
    if options.junit:
        print_result(read_junit(options.junit), options)
        return
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        took = run_gate(junit)
        targets = [at_most("the gate, minutes", took["minutes"], MOST_MINUTES)]
        print_result({**took, **read_junit(junit), "targets": targets, "plots": []}, options)


if __name__ == "__main__":
    main()
