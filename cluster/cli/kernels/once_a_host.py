"""Compiles what this host lacks, beside a start or ahead of one. On a host one process compiles at a time.

Other processes wait for it, look again what they lack, and find what it has built.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from tandem.cache.kernels.build.build_once import cache_folder, locked, share_triton_cache
from tandem.cache.kernels.build.side_by_side import Build, read_budget
from tandem.cluster.cli.kernels.builds import STALL_SECONDS, Check, Running, Say, build_all, plan_for, start
from tandem.cluster.cli.kernels.lock_holder import name_holder, write_holder
from tandem.cluster.cli.kernels.plan import KernelPlan
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import UsageError

LOCK = ".builds.lock"  # in the folder of compiled kernels
LOCK_SECONDS = 1200.0  # then a build of another process no longer counts
LINE_SECONDS = 60.0  # between two lines about that process
NICENESS = 10  # of compilers beside a start: its processes need the cores more
LEAST_URGENT = 19

Builder = Callable[[KernelPlan, Say, Check], list[str]]
"""Builds what a plan misses, and returns what failed, with the reasons."""


def build_beside(config: ClusterConfig, say: Say) -> Future[None]:
    """Begins to build what a start lacks on this host, in a thread. What cannot be built is built at its first use, or
    other kernels serve.

    The future is done once the workers can load the kernels. cancel() ends the compilers.
    """
    share_triton_cache()
    done: Future[None] = Future()

    def check() -> None:
        if done.cancelled():
            raise CancelledError

    def run() -> None:
        error: BaseException | None = None
        try:
            with suppress(UsageError):  # GPUs of several kinds, or of another host
                for reason in build_once_a_host(
                    partial(plan_for, config), say, check, partial(build, NICENESS, STALL_SECONDS)
                ):
                    say(f"not built ahead: {reason}")
        except BaseException as raised:
            error = raised
        if done.set_running_or_notify_cancel():
            done.set_result(None) if error is None else done.set_exception(error)

    threading.Thread(target=run, name="builds").start()  # no daemon: the process outlives its compilers
    return done


def build_once_a_host(plan: Callable[[], KernelPlan], say: Say, check: Check, builder: Builder) -> list[str]:
    """Builds what the plan misses, unless another process of this host does. Returns what is lacking and what failed,
    each with the reason."""
    if not (found := plan()).missing:
        return [*found.lacking]
    with ExitStack() as held:
        with suppress(OSError):  # in a folder that cannot be written nobody builds
            cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = cache_folder() / LOCK
            if held.enter_context(locked(lock, LOCK_SECONDS, _Waiting(lock, say, check))):
                write_holder(lock)
        found = plan()
        return [*found.lacking, *(builder(found, say, check) if found.missing else ())]


def build(niceness: int, stall_seconds: float, plan: KernelPlan, say: Say, check: Check) -> list[str]:
    """The Builder that runs compilers. stall_seconds: see build_all()."""

    def begin(one: Build, jobs: int) -> Running:
        running = start(one, jobs)
        with suppress(ProcessLookupError):  # it has ended already
            os.setpriority(os.PRIO_PGRP, running.process.pid, min(os.nice(0) + niceness, LEAST_URGENT))
        return running

    return build_all(plan.missing, read_budget(), say, begin, check, stall_seconds)


class _Waiting:
    """Called while another process holds the lock. Names that process at once, and then every LINE_SECONDS."""

    def __init__(self, lock: Path, say: Say, check: Check) -> None:
        self._lock, self._say, self._check = lock, say, check
        self._began = self._due = time.monotonic()

    def __call__(self) -> None:
        self._check()
        now = time.monotonic()
        if now >= self._due:
            self._due = now + LINE_SECONDS
            so_far = f"{now - self._began:.0f} of at most {LOCK_SECONDS:.0f} s so far"
            self._say(f"waits for {name_holder(self._lock)}: {so_far}")
