"""Runs of benchmarks as they are kept: a JSON file in results/ for each benchmark and kind of host.

    {"benchmark": "ttft", "host_kind": "h200-x2", "runs": [the oldest, …, the newest]}

A run has its date, commit, command, host, versions and numbers. Numbers have dotted names, a median, a spread (the
least and the largest repeat) and how many repeats there were; null is not known. A run may have measured a part only.
Names begin with the result's `case`, if it has one: numbers under other options are other numbers.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.benchmarks.measured import Measured

RESULTS = Path(__file__).with_name("results")
PACKAGES = (
    "torch",
    "triton",
    "flashinfer-python",
    "nvshmem4py-cu13",
    "nvshmem4py-cu12",
    "ray",
    "grpcio",
    "transformers",
)
UNKNOWN = "unknown"
LINE_WIDTH = 160  # of a list or an object in one line

Record = dict[str, Any]


def add_run(benchmark: str, result: Mapping[str, Any], *, gpus: int, commit: str | None, folder: Path) -> Path:
    """Adds this process's run to the record of its host kind; returns the file, which is written in `folder`.

    What was recorded before is read from there, or else from RESULTS. commit: None for the one checked out.
    """
    kind = host_kind(gpus)
    path = folder / f"{benchmark}-{kind}.json"
    before = next((place for place in (path, RESULTS / path.name) if place.exists()), None)
    record = json.loads(before.read_text(encoding="utf-8")) if before else {}
    runs = [*record.get("runs", ()), run_of(benchmark, result, gpus, commit)]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json({"benchmark": benchmark, "host_kind": kind, "runs": runs}) + "\n", encoding="utf-8")
    return path


def run_of(benchmark: str, result: Mapping[str, Any], gpus: int, commit: str | None) -> dict[str, Any]:
    measured = {key: value for key, value in result.items() if key not in ("targets", "plots", "peers")}
    case = f"{result['case']}: " if result.get("case") else ""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit or head(),
        "command": " ".join([f"python -m tests.benchmarks.{benchmark}", *sys.argv[1:]]),
        "host": host(gpus),
        "versions": versions(),
        "note": "",
        "numbers": {f"{case}{name}": number for name, number in numbers_of(measured)},
        "targets": [_target(case, target) for target in result.get("targets", ())],
        "peers": [peer | {"number": f"{case}{peer['number']}"} for peer in result.get("peers", ())],
    }


def read_peer(benchmark: str, number: str) -> float | None:
    """Returns the value of the first peer with that number; None if none was measured."""
    peers = json.loads((RESULTS / "peers.json").read_text(encoding="utf-8"))["peers"]
    return next((one["value"] for one in peers if (one["benchmark"], one["number"]) == (benchmark, number)), None)


def numbers_of(value: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number in it by a dotted name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers_of(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, {"median": value, **_spread_of(value)}


def _target(case: str, target: Mapping[str, Any]) -> dict[str, Any]:
    return {**target, "name": f"{case}{target['name']}", **_spread_of(target["value"])}


def _spread_of(value: float) -> dict[str, Any]:
    if isinstance(value, Measured):
        return {"spread": [value.low, value.high], "repeats": value.repeats}
    return {"spread": None, "repeats": None}


def host_kind(gpus: int) -> str:
    """h200, h200-x2, cpu-16: what numbers are compared on."""
    if not gpus:
        return f"cpu-{len(os.sched_getaffinity(0))}"
    model = re.search(r"[A-Z]+\d+\w*", gpu_names()[0])
    name = model[0].lower() if model else "gpu"
    return name if gpus == 1 else f"{name}-x{gpus}"


def host(gpus: int) -> dict[str, Any]:
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "cpu": cpu[1].strip() if cpu else UNKNOWN,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_names()[:gpus] if gpus else [],
    }


def gpu_names() -> list[str]:
    import torch  # takes seconds, and records of CPU benchmarks need none of it

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def versions() -> dict[str, str]:
    """Returns the versions of Python and of those PACKAGES that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def head() -> str:
    """The commit checked out, with a + where files differ from it; UNKNOWN where there is no git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
            cwd=RESULTS.parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return described.stdout.strip()


def to_json(value: Any, indent: int = 0) -> str:
    """Formats JSON: whatever fits into LINE_WIDTH stands in one line."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= LINE_WIDTH or not isinstance(value, dict | list) or not value:
        return line
    pad, (begin, end) = " " * (indent + 1), "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, dict):
        parts = [f"{json.dumps(name, ensure_ascii=False)}: {to_json(of, indent + 1)}" for name, of in value.items()]
    else:
        parts = [to_json(of, indent + 1) for of in value]
    return f"{begin}\n{pad}" + f",\n{pad}".join(parts) + f"\n{' ' * indent}{end}"
