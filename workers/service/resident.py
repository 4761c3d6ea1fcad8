"""Memory of a process, as Linux counts it."""

import os
from pathlib import Path


def resident_bytes(pid: int | None = None) -> int:
    """Returns the bytes in memory now of this process or another. OSError where there is none."""
    return int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
