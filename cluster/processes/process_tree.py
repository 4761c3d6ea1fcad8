"""The processes below another one, each known by its pid and the time of its start: a pid may be used again."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PARENT, STARTED = 1, 19  # fields of /proc/PID/stat after the name

Process = tuple[int, str]  # pid, start in ticks of this machine's clock


def started_at(pid: int) -> str:
    """Returns when that process was started; empty if there is none, or if it waits to be reaped."""
    fields = _fields(pid)
    return fields[STARTED] if fields and fields[0] != "Z" else ""


def children(pid: int) -> set[Process]:
    return {process for process, parent in _all() if parent == pid}


def descendants(pid: int) -> set[Process]:
    """Returns a process's children, their children, and so on. Children of an ended process are not found."""
    by_parent: dict[int, list[Process]] = {}
    for process, parent in _all():
        by_parent.setdefault(parent, []).append(process)
    found: set[Process] = set()
    unseen = [pid]
    while unseen:
        below = by_parent.pop(unseen.pop(), [])
        found.update(below)
        unseen += [child for child, _ in below]
    return found


def runs(process: Process) -> bool:
    pid, started = process
    return started_at(pid) == started


def kill(processes: Iterable[Process]) -> None:
    for process in processes:
        if runs(process):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process[0], signal.SIGKILL)


def _all() -> list[tuple[Process, int]]:
    """Lists each process and its parent."""
    known = [(int(entry), _fields(int(entry))) for entry in os.listdir("/proc") if entry.isdecimal()]
    return [((pid, fields[STARTED]), int(fields[PARENT])) for pid, fields in known if fields]


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
