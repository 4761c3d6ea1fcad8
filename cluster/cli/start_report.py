"""What `tandem up` says on stderr while it starts: a line a phase, and how far the workers are."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_SECONDS = 10.0  # between two lines about a phase that takes longer
GIB = 1 << 30
PHASES = {
    "host": "checking this host",
    "imports": "importing torch and Ray",
    "checkpoint": "checking the checkpoint",
    "ray": "starting Ray",
    "processes, imports": "starting the workers' processes, which import",
    "weights": "reading weights",
    "memory": "running the largest forward, and measuring the room for pages",
    "builds": "waiting for kernels that are being compiled",
    "island": "opening the workers' memory to each other",
    "kernels": "warming up kernels; those that no start has compiled here take minutes on a GPU",
    "gateway": "opening the gateway's ports, and warming up",
    "replacement": "taking over from the running cluster",
}

State = tuple[str, str, int, int]  # worker, phase of its start, bytes loaded and in all; in "kernels" those ready and 0


class StartReport:
    """Lines on stderr; on a terminal also a bar for each worker. Any thread may begin a phase."""

    def __init__(self, cluster: str, also: Callable[[str], None] = lambda phase: None) -> None:
        """also: hears of each phase that begins, in words."""
        self._cluster = cluster
        self._also = also
        self._lock = threading.Lock()
        self._phase = ""
        self._began = self._said = time.monotonic()
        self._bars: _Bars | None = None

    def __enter__(self) -> "StartReport":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes the bars away; idempotent."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def phase(self, name: str) -> None:
        """Says what begins, and how long the phase before it took. Islands that start beside each other say it once."""
        with self._lock:
            if name == self._phase:
                return
            now = time.monotonic()
            before = f" ({self._phase}: {now - self._began:.1f} s)" if self._phase else ""
            self._phase, self._began, self._said = name, now, now
            self._write(PHASES.get(name, name) + before)
            self._also(PHASES.get(name, name))

    def line(self, text: str) -> None:
        """Prints a line that belongs to no phase."""
        with self._lock:
            self._write(text)

    def show(self, states: Sequence[State]) -> None:
        """Shows how far the workers that answer are: bars on a terminal, elsewhere a line each LINE_SECONDS."""
        with self._lock:
            if states and sys.stderr.isatty():
                self._bars = self._bars or _Bars()
                self._bars.show(states)
                return
            now = time.monotonic()
            if now - self._said >= LINE_SECONDS:
                self._said = now
                self._write(f"{self._phase}, {now - self._began:.0f} s so far{_got_to(states)}")

    def _write(self, text: str) -> None:
        line = f"tandem: {self._cluster}: {text}"
        if self._bars is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bars.print(line)


class _Bars:
    """A bar for each worker, with the phase of its start, until stop()."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._tasks: dict[str, TaskID] = {}
        self._progress.start()

    def stop(self) -> None:
        self._progress.stop()

    def print(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    def show(self, states: Sequence[State]) -> None:
        for name, phase, done, total in states:
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=None)
            text = f"{name}: {phase}" if phase else name
            if phase == "kernels":  # counted, and not in bytes
                self._progress.update(self._tasks[name], description=f"{text}, {done} ready")
            else:
                self._progress.update(self._tasks[name], description=text, completed=done, total=total or None)


def _got_to(states: Sequence[State]) -> str:
    """Returns how far the workers are; empty if none answers."""
    return ": " + "; ".join(map(_worker, states)) if states else ""


def _worker(state: State) -> str:
    name, phase, done, total = state
    if phase == "kernels":
        return f"{name} {done} ready"
    got_to = f", {done / GIB:.1f} of {total / GIB:.1f} GiB" if phase == "weights" and total else ""
    return f"{name} {phase or 'waits'}{got_to}"
