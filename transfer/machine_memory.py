"""How much memory this process may use."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def machine_memory() -> int:
    """Bytes that this machine has, or that the control groups of this process may use, if that is less."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([there, *cgroup_limits(OWN_CGROUP, CGROUPS)])


def cgroup_limits(own: Path, mounted: Path) -> list[int]:
    """Returns the byte limits of a process's control groups that have one. own: a file like /proc/self/cgroup.
    mounted: the folder of groups of version 2; groups of version 1 are in its folder `memory`."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    limits = []
    for hierarchy, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if hierarchy == "0":
            root, name = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = root / path.strip("/")
        for folder in (group, *group.parents):  # in a container the path may be the host's, and the root is the group
            limits += _limit(folder / name)
            if folder == root:
                break
    return limits


def _limit(file: Path) -> list[int]:
    try:
        return [int(file.read_text(encoding="ascii"))]
    except (OSError, ValueError):  # not there, or max
        return []
