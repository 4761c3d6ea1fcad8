"""Compiles what a cluster needs, side by side within the host's memory, and reports the progress."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

from tandem.cache.kernels.build.nvml import read_driver
from tandem.cache.kernels.build.side_by_side import Budget, Build
from tandem.cluster.cli.kernels.plan import KernelPlan, choose_target, plan_kernels
from tandem.cluster.config.cluster_config import ClusterConfig

LINE_SECONDS = 10.0  # between two lines while nothing begins or ends
POLL_SECONDS = 0.1
STALL_SECONDS = 1200.0  # a start goes on after so long without a build that ends
MOST_SAID = 300  # characters of what a compiler said, its last ones

Say = Callable[[str], None]
Check = Callable[[], None]
"""Called a few times a second while compilers run. What it raises ends them."""


@dataclass(frozen=True, eq=False)
class Running:
    """A build under way."""

    build: Build
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    began: float


def plan_for(config: ClusterConfig, gpu: str | None = None) -> KernelPlan:
    """gpu: a name of TARGETS; None is this host's. Raises ConfigError and UsageError."""
    return plan_kernels(config, choose_target(gpu, read_driver()) if config.island.device == "cuda" else None)


def start(build: Build, jobs: int) -> Running:
    """The one place that runs a compiler: a process of its own, with `jobs` compilers at most."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # Running owns it
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem.cluster.cli.kernels.build_one", build.order, str(os.getpid())],
        env=os.environ | {"MAX_JOBS": str(jobs)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # its compilers end with it
    )
    return Running(build, process, errors, time.monotonic())


def build_all(
    builds: Sequence[Build],
    budget: Budget,
    say: Say,
    start: Callable[[Build, int], Running] = start,
    check: Check = lambda: None,
    stall_seconds: float = math.inf,
) -> list[str]:
    """Builds all, and returns what failed: title and reason. A failure ends no other; an exception ends all, and so do
    `stall_seconds` in which no build ended."""
    waiting, running, failed = list(builds), list[Running](), list[str]()
    began = said = got_on = time.monotonic()
    done = 0
    try:
        while waiting or running:
            for build in budget.fitting(waiting, [one.build for one in running]):
                waiting.remove(build)
                running.append(start(build, budget.jobs(build)))
                said = time.monotonic()
                number = done + len(running)
                say(f"building {build.title} ({number} of {len(builds)}), {said - began:.0f} s so far")
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                done += 1
                failed += _end(one, say)
                got_on = time.monotonic()
            if time.monotonic() - got_on > stall_seconds:
                left = [*(one.build for one in running), *waiting]
                return failed + [f"{build.title}: no build ended for {stall_seconds:.0f} s" for build in left]
            if running and time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                titles = ", ".join(one.build.title for one in running)
                say(f"still building {titles}: {done} of {len(builds)} done, {said - began:.0f} s so far")
            check()
            time.sleep(POLL_SECONDS if running else 0)
    finally:
        for one in running:
            _kill(one)
    return failed


def _kill(one: Running) -> None:
    """Ends a build with its compilers."""
    _kill_compilers(one)
    one.process.wait()
    one.errors.close()


def _kill_compilers(one: Running) -> None:
    with suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)


def _end(one: Running, say: Say) -> list[str]:
    """Ends a build. Returns what failed, if it did."""
    seconds = time.monotonic() - one.began
    one.errors.seek(0)
    reason = one.errors.read().decode(errors="replace").strip()
    one.errors.close()
    code = one.process.returncode
    if code == 0:
        say(f"built {one.build.title} in {seconds:.0f} s")
        return []
    _kill_compilers(one)  # run_compiler() kills a compiler that takes too long, but not what it started
    if code < 0:
        reason = f"ended by signal {-code}" + (", which the kernel sends when memory runs out" if code == -9 else "")
    lines = " ".join(reason.split())[-MOST_SAID:]
    return [f"{one.build.title}: {lines or f'exit code {code}'}"]
