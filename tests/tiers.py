"""The tiers of the tests, and the order in which the processes of a run get their files.

unit   no process, cluster, compiler or model of transformers: everything that NOT_UNIT does not name
gate   all that is not marked `long`: `make test`
long   what is marked `long`: `make test-long`

A test marked `gate("llama-*", "qwen3")` has cases of both: ids like these are in the gate, others are long.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# Folders and files that `make test-unit` does not even import.
NOT_UNIT = (
    "tests/benchmarks",
    "tests/chaos",
    "tests/contracts",
    "tests/deploy",
    "tests/e2e",
    "tests/fuzz",
    "tests/gpu",
    "tests/protocol",
)

# Their tests start a Ray, or several. One process has them all, so that no two clusters start at a time.
RAY = (
    "tests/e2e/test_hosts.py",
    "tests/e2e/test_partitions.py",
    "tests/deploy/test_several_hosts.py",
    "tests/e2e/test_up.py",
    "tests/e2e/test_replace.py",
    "tests/chaos/test_ray_storm.py",
    "tests/e2e/test_launch.py",
    "tests/deploy/test_started.py",
    "tests/e2e/test_interrupted_start.py",
    "tests/e2e/test_operator.py",
    "tests/cluster/processes/test_ray_processes.py",
    "tests/cluster/processes/test_ray_watch.py",
)

# Files that take long begin first, after those of RAY.
SLOWEST = (
    "tests/e2e/test_parity.py",
    "tests/protocol/test_explorer.py",
    "tests/cache/operations/test_programs.py",
    "tests/chaos/test_storm.py",
    "tests/workers/kernels/test_megakernel.py",
    "tests/e2e/test_speculation.py",
    "tests/e2e/test_recovery.py",
)


def missing(root: Path) -> list[str]:
    """Names in this file of what is not there."""
    return [name for name in (*NOT_UNIT, *RAY, *SLOWEST) if not (root / name).exists()]


def is_unit(path: Path, root: Path) -> bool:
    """path: of a file or a folder."""
    return not any(path.is_relative_to(root / name) for name in NOT_UNIT)


def mark_long_cases(items: Sequence[pytest.Item]) -> list[str]:
    """Marks as long the cases that a `gate` marker leaves out. Returns its patterns that no case is like."""
    unused: dict[str, bool] = {}
    for item in items:
        marker = item.get_closest_marker("gate")
        if marker is None or not isinstance(item, pytest.Function):
            continue
        like = [fnmatchcase(item.callspec.id, pattern) for pattern in marker.args]
        if not any(like):
            item.add_marker("long")
        for pattern, one in zip(marker.args, like, strict=True):
            test = f"{item.nodeid.partition('[')[0]}, {pattern}"
            unused[test] = unused.get(test, True) and not one
    return [test for test, is_unused in unused.items() if is_unused]
