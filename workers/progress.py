"""Progress of a long load, shown on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

ReportBytes = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def ignore_progress(done: int, total: int) -> None:
    """A ReportBytes that shows nothing."""


@contextmanager
def progress_bar(label: str, show: bool | None = None) -> Iterator[ReportBytes]:
    """A bar on stderr that the yielded function moves. show None: only if stderr is a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield ignore_progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
