"""The time from `tandem up` to ready, for Qwen3-8B's shape with random weights on two GPUs, phase by phase. Prints
JSON.

Two starts, one after the other: the first may build kernels, the second finds them cached and is the one that counts.
`ready_seconds` runs from the start of the process to its ready line; phases are what the cluster reports itself.
--ranks 2: one worker of two GPUs, which computes prompts and decodes.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tandem.cluster.cli.runtime_dir import running_cluster
from tests.benchmarks.model_shapes import SHAPES, shape_name, write_shape
from tests.benchmarks.options import benchmark_parser
from tests.benchmarks.pair import DEPLOY
from tests.benchmarks.results import at_most, plot, print_result, print_skipped, rounded

MODEL = "qwen3-8b"
STOP_SECONDS = 60.0
TARGET_SECONDS, RANKS_TARGET_SECONDS = 40.0, 60.0


@contextmanager
def running_up(config: Path, model: Path, settings: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """The name of a cluster that the command line has started, and the seconds until it was ready. Raises SystemExit
    when it does not get ready."""
    name = f"bench-start-{os.getpid()}-{secrets.token_hex(2)}"
    command = [sys.executable, "-m", "tandem.cluster.cli", "up", str(config), "--model", str(model)]
    for key, value in {"name": name, "gateway.port": 0, **settings}.items():
        command += ["--set", f"{key}={value}"]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.monotonic() - began
        if not line.startswith("ready grpc="):
            raise SystemExit(f"no ready line but {line!r}")
        yield name, seconds
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_SECONDS)


def start_once(config: Path, model: Path, settings: Mapping[str, object]) -> dict[str, Any]:
    """Starts and stops a cluster by the command line."""
    with running_up(config, model, settings) as (name, seconds):
        state = running_cluster(name)
        assert state is not None
        return {"ready_seconds": rounded(seconds), "phases": dict(state.start_seconds)}


def result_of(first: dict[str, Any], second: dict[str, Any], target: float) -> dict[str, Any]:
    phases = list(second["phases"])
    bars = {
        name: [start["phases"][phase] for phase in phases] for name, start in (("first", first), ("second", second))
    }
    return {
        "first": first,
        "second": second,
        "targets": [at_most("tandem up to ready, kernels cached, s", second["ready_seconds"], target)],
        "plots": [plot("from tandem up to ready", "", "s", phases, bars)],
    }


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--model", type=shape_name, choices=list(SHAPES), default=MODEL)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="GPUs of a worker")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print_skipped("needs two CUDA devices of one host")
        return
    config, settings, target = DEPLOY / "gpu-1p1d.yaml", {"model.load_format": "dummy"}, TARGET_SECONDS
    if options.ranks > 1:
        config, target = DEPLOY / "gpu-1.yaml", RANKS_TARGET_SECONDS
        settings["island.decode_ranks"] = str(options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(options.model, Path(folder))
        first, second = (start_once(config, model, settings) for _ in range(2))
    case = [] if options.model == MODEL else [options.model]
    case += [f"{options.ranks} ranks"] if options.ranks > 1 else []
    result = result_of(first, second, target) | ({"case": ", ".join(case)} if case else {})
    print_result(result, options, gpus=2)


if __name__ == "__main__":
    main()
