"""How a long load says how far it is; the launcher draws the bars."""

from collections.abc import Callable

ReportBytes = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def ignore_progress(done: int, total: int) -> None:
    """A ReportBytes that shows nothing."""
