"""The PEs of a benchmark, a process each."""

import multiprocessing
import tempfile
from collections.abc import Callable


def run_pes(run: Callable[..., None], num_pes: int, *arguments: object) -> None:
    """run(pe, folder, *arguments) for every PE at once, in a folder that they share; SystemExit where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        pes = [context.Process(target=run, args=(pe, folder, *arguments), daemon=True) for pe in range(num_pes)]
        for process in pes:
            process.start()
        for process in pes:
            process.join()
    if any(process.exitcode for process in pes):
        raise SystemExit(1)
