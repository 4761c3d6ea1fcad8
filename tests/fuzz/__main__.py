"""`make fuzz`: bad input for both gRPC services and for the loader of configurations. Prints JSON: what came of it.

python -m tests.fuzz [services|configs ...] [--inputs N] [--seed N]

The inputs are shared out over the parts; a failure names seed and number of its input, and the same seed and number of
inputs make the same ones again.
"""

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tests.fuzz import configs, services
from tests.support.island import running_island


def fuzz_services(folder: Path, seed: int, count: int) -> dict[str, Any]:
    make_checkpoint(folder / "model", arch="llama", size="tiny", seed=3)
    with running_island(folder / "model", services.OVERRIDES) as island:
        outcome = services.Fuzz(island, seed).run(count)
    return {"good requests beside them": outcome.good, **dict(sorted(outcome.statuses.items()))}


def fuzz_configs(folder: Path, seed: int, count: int) -> dict[str, Any]:
    return configs.fuzz(seed, count, folder / "cluster.yaml")


PARTS: dict[str, Callable[[Path, int, int], dict[str, Any]]] = {"services": fuzz_services, "configs": fuzz_configs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all when left out")
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    parts = options.parts or list(PARTS)
    for part in parts:
        count, begun = options.inputs // len(parts), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tandem-fuzz-") as folder:
            outcome = PARTS[part](Path(folder), options.seed, count)
        inputs = {"part": part, "seed": options.seed, "inputs": count, "seconds": round(time.monotonic() - begun)}
        print(json.dumps(inputs | outcome, indent=1), flush=True)


if __name__ == "__main__":
    main()
