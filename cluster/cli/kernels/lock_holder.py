"""The process that holds the lock of a host's builds, as the lock's file names it."""

import os
import time
from contextlib import suppress
from pathlib import Path

from tandem.cluster.processes import process_tree


def write_holder(lock: Path) -> None:
    """Names this process in the file of a lock that it holds. Does nothing if another user owns the file."""
    pid = os.getpid()
    with suppress(OSError):
        lock.write_text(f"{pid} {process_tree.started_at(pid)} {int(time.time())}")


def name_holder(lock: Path) -> str:
    """Returns the name of the process that holds a lock, with its pid if that is known."""
    with suppress(OSError, ValueError):
        pid, started, since = lock.read_text(encoding="utf-8").split()
        if process_tree.runs((int(pid), started)):
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(since)))
            return f"process {pid} of this host, which has been building kernels since {began}"
    return "another process of this host, which builds kernels"
