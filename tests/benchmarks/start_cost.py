"""CPU seconds from `tandem up` to ready on a CPU, against those of one import of what its processes need. Prints JSON.

Ray's own processes do not count, and the process hosts count as such: they import nothing of ours. What the launcher
spends in Ray counts. The checkpoint is tiny, so that reading it costs nothing. Runs alternate; medians count.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.supervision.process_modules import process_modules
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.benchmarks.options import benchmark_parser
from tests.benchmarks.pair import DEPLOY
from tests.benchmarks.results import at_most, print_result, rounded
from tests.benchmarks.start import running_up

TITLE = "tandem: "
TARGET_RATIO = 1.4
TARGET_SECONDS = 12.0


def seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def cost_of_start(model: Path, settings: dict[str, object]) -> dict[str, Any]:
    """settings: of the cluster, beside deploy/local.yaml."""
    with running_up(DEPLOY / "local.yaml", model, {"gateway.http_port": 0, **settings}) as (name, seconds):
        found: dict[str, float] = {}
        for one in psutil.process_iter():
            title = " ".join(one.cmdline()).strip()
            if title.startswith(f"{TITLE}{name}/"):
                found[title.removeprefix(f"{TITLE}{name}/")] = rounded(seconds_of(one))
        return {"ready_seconds": rounded(seconds), "cpu_seconds": rounded(sum(found.values())), "processes": found}


def cost_of_import() -> float:
    """CPU seconds of a process that imports all that a cluster's processes import."""
    modules = [entry.partition(":")[0] for entry in process_modules(load_config(None, {"gateway.http_port": 0}))]
    program = (
        f"import {', '.join(modules)}, tandem.cluster.supervision.launcher; import resource; "
        "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster")
    options = parser.parse_args()
    settings: dict[str, object] = dict(entry.split("=", 1) for entry in options.set)
    with tempfile.TemporaryDirectory(prefix="tandem-start-") as folder:
        model = Path(folder) / "model"
        make_checkpoint(model, arch="llama", size="tiny", seed=0)
        cost_of_start(model, settings)  # compiles what is compiled once
        runs = [(cost_of_import(), cost_of_start(model, settings)) for _ in range(options.repeats)]
    imports = median(seconds for seconds, _ in runs)
    starts = sorted((start for _, start in runs), key=lambda start: start["cpu_seconds"])
    start = starts[len(starts) // 2]
    ratio = start["cpu_seconds"] / imports
    ready = median(start["ready_seconds"] for start in starts)
    targets = [
        at_most("CPU seconds of a start / of one import", rounded(ratio), TARGET_RATIO),
        at_most("tandem up to ready, s", ready, TARGET_SECONDS),
    ]
    result = {"import_cpu_seconds": rounded(imports), "start": start, "starts": starts, "settings": settings}
    print_result(result | {"targets": targets}, options)


if __name__ == "__main__":
    main()
