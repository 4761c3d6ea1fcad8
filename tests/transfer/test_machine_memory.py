"""Memory that control groups leave to a process."""

from pathlib import Path

import pytest

from tandem.transfer import machine_memory as module
from tandem.transfer.machine_memory import cgroup_limits, machine_memory


def group(folder: Path, name: str, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(limit)


def test_each_group_above_limits_a_process(tmp_path: Path) -> None:
    own, mounted = tmp_path / "own", tmp_path / "fs"
    own.write_text("0::/a/b\n")
    group(mounted, "memory.max", "9999\n")
    group(mounted / "a", "memory.max", "max\n")
    group(mounted / "a" / "b", "memory.max", "5000\n")
    group(mounted / "a" / "c", "memory.max", "1\n")
    assert cgroup_limits(own, mounted) == [5000, 9999]


def test_groups_of_version_1(tmp_path: Path) -> None:
    own, mounted = tmp_path / "own", tmp_path / "fs"
    own.write_text("12:cpu,cpuacct:/x\n7:memory:/docker/1\n")
    group(mounted / "memory", "memory.limit_in_bytes", "77\n")  # all that a container sees
    assert cgroup_limits(own, mounted) == [77]


def test_without_groups_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OWN_CGROUP", tmp_path / "none")
    whole = machine_memory()
    assert whole > 1 << 28
    own, mounted = tmp_path / "own", tmp_path / "fs"
    own.write_text("0::/\n")
    group(mounted, "memory.max", "123456\n")
    monkeypatch.setattr(module, "OWN_CGROUP", own)
    monkeypatch.setattr(module, "CGROUPS", mounted)
    assert machine_memory() == 123456
