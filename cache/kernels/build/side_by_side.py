"""Compilers side by side, within a host's memory and cores."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

USABLE = 0.8  # of the memory that is available now; others of this host want some, too
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Build:
    """One thing to compile. order: what the process that compiles it is told, as JSON."""

    title: str
    order: str
    units: int = 1  # compilers that it keeps busy at once, at most
    compiler_bytes: int = 1 << 30  # memory of one of them


@dataclass(frozen=True)
class Budget:
    """The memory and cores that concurrent compilers may use together."""

    memory: int  # bytes
    cores: int

    def jobs(self, build: Build) -> int:
        """Compilers that a build gets, at least one: alone it must be possible."""
        return max(1, min(build.units, self.cores, self.memory // build.compiler_bytes))

    def fitting(self, waiting: Sequence[Build], running: Sequence[Build]) -> list[Build]:
        """Returns the builds of `waiting`, in order, that may start while `running` run.

        Where the first one does not fit, later ones do not overtake it: it would never fit.
        """
        started: list[Build] = []
        for build in waiting:
            beside = [*running, *started]
            if beside and not self._holds([*beside, build]):
                break
            started.append(build)
        return started

    def _holds(self, builds: Sequence[Build]) -> bool:
        memory = sum(self.jobs(build) * build.compiler_bytes for build in builds)
        return memory <= self.memory and sum(map(self.jobs, builds)) <= self.cores


def largest_first(builds: Sequence[Build]) -> list[Build]:
    """The order in which all are done soonest: small ones fill what large ones leave."""
    return sorted(builds, key=lambda build: build.units * build.compiler_bytes, reverse=True)


def read_budget() -> Budget:
    """Reads the budget of this host, or of the container that this process runs in."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    (available,) = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    limits = [available]
    try:
        limit, used = ((CGROUP / name).read_text(encoding="utf-8").strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            limits.append(int(limit) - int(used))
    except (OSError, ValueError):  # no limit is known
        pass
    return Budget(int(min(limits) * USABLE), len(os.sched_getaffinity(0)))
