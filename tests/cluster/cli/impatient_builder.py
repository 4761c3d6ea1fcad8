"""build_here in a process whose clock jumps an hour ahead once a compiler runs: its pid is in the file COMPILERS."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

from tandem.cluster.cli.kernels import build_here, builds


def monotonic() -> float:
    return time.monotonic() + 3600 * Path(os.environ["COMPILERS"]).exists()


if __name__ == "__main__":
    builds.time = SimpleNamespace(sleep=time.sleep, monotonic=monotonic)  # type: ignore[assignment]
    build_here.main()
