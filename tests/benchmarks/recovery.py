"""What a lost worker costs: kill -9 of the prefill or the decode worker while a request runs, under Ray. Prints JSON.

For one and for two islands of a prefill and a decode worker, median and worst of `--rounds` kills of each:
detected   from the kill to the gateway's knowing: the island takes no requests any more
token      from the kill to the next token of the request, which is placed again
serving    from the kill to the island's next epoch taking requests
Every request must end with all its tokens. On two GPUs one island of Qwen3-0.6B's shape, on four two; a tiny model
without a GPU.
"""

import argparse
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.cluster.client import Client
from tandem.cluster.config import load_config
from tandem.cluster.launcher import Cluster
from tandem.proto import inference_pb2
from tandem.workers.random_checkpoint import make_checkpoint
from tests.benchmarks.model_shapes import write_shape
from tests.benchmarks.pair import DEPLOY
from tests.benchmarks.results import at_most, print_result, print_skipped, rounded

NUM_TOKENS = 400
PROMPT_TOKENS = 512
DETECTION_TARGET_SECONDS = 2.0
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Recovery:
    """Seconds from one kill."""

    detected: float
    token: float
    serving: float


def recover(address: str, role: "inference_pb2.Role.ValueType") -> Recovery:
    """Kills the worker of that role that serves a request: a decode worker in mid-stream, a prefill worker at once."""
    kills_early = role == inference_pb2.ROLE_PREFILL
    arrivals: list[float] = []
    with Client(address) as client:
        before = {island.name: island.epoch for island in client.cluster_info().islands}

        def stream() -> None:
            prompt = [3 + (number * 7 + time.monotonic_ns()) % 400 for number in range(PROMPT_TOKENS)]
            for update in client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True):
                arrivals.extend([time.monotonic()] * len(update.token_ids))

        streaming = threading.Thread(target=stream)
        streaming.start()
        if not kills_early:
            _until(lambda: len(arrivals) > 10)
        island = _until(lambda: _serving_island(client))
        (pid,) = [worker.pid for worker in island.workers if worker.role == role]
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        _until(lambda: not _is(client, island.name, before[island.name]))
        detected = time.monotonic() - killed
        _until(lambda: _is(client, island.name, before[island.name] + 1))
        serving = time.monotonic() - killed
        streaming.join(PATIENCE_SECONDS)
    if len(arrivals) != NUM_TOKENS:
        raise SystemExit(f"{len(arrivals)} tokens came; {NUM_TOKENS} were asked for")
    after = [max(killed, arrival) for arrival in arrivals]
    gap = max(later - earlier for earlier, later in zip([killed, *after], after, strict=False))
    return Recovery(detected, gap, serving)


def _is(client: Client, name: str, epoch: int) -> bool:
    """Whether the island takes requests in that epoch."""
    return any(island.name == name and island.epoch == epoch and island.workers for island in _islands(client))


def _islands(client: Client) -> list[inference_pb2.IslandInfo]:
    return list(client.cluster_info().islands)


def _serving_island(client: Client) -> inference_pb2.IslandInfo | None:
    busy = [island for island in _islands(client) if any(worker.running + worker.waiting for worker in island.workers)]
    return busy[0] if busy else None


def _until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := found()):
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came of it within {PATIENCE_SECONDS:g} s")
        time.sleep(0.005)
    return value


def measure(config: Path, overrides: dict[str, Any], rounds: int) -> dict[str, Any]:
    cluster = Cluster(load_config(config, overrides))
    address = cluster.start()
    try:
        found = {
            name: [recover(address, role) for _ in range(rounds)]
            for name, role in (("prefill", inference_pb2.ROLE_PREFILL), ("decode", inference_pb2.ROLE_DECODE))
        }
    finally:
        cluster.stop()
    return {
        f"{role} {part}_seconds": {
            "median": rounded(statistics.median(getattr(one, part) for one in recoveries)),
            "worst": rounded(max(getattr(one, part) for one in recoveries)),
        }
        for role, recoveries in found.items()
        for part in ("detected", "token", "serving")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        print_skipped("needs two CUDA devices of one host, or none")
        return
    common: dict[str, Any] = {
        "name": f"bench-{os.getpid()}",
        "gateway.port": 0,
        "gateway.max_attempts": 20,
        "recovery.max_restarts": 10_000,
        "cache.num_pages": 1024,
    }
    with tempfile.TemporaryDirectory() as folder:
        if num_gpus:
            config = DEPLOY / "gpu-1p1d.yaml"
            common |= {"model.path": str(write_shape("qwen3-0.6b", Path(folder))), "model.load_format": "dummy"}
        else:
            config = DEPLOY / "local.yaml"
            make_checkpoint(Path(folder) / "model", arch="llama", size="tiny", seed=0)
            common |= {"model.path": f"{folder}/model", "island.threads_per_worker": 1}
        counts = [count for count in (1, 2) if not num_gpus or 2 * count <= num_gpus]
        islands = {f"islands {count}": measure(config, common | {"num_islands": count}, rounds) for count in counts}
    worst = max(
        numbers[f"{role} detected_seconds"]["worst"] for numbers in islands.values() for role in ("prefill", "decode")
    )
    print_result(
        islands | {"targets": [at_most("kill to admission stopped, worst, s", worst, DETECTION_TARGET_SECONDS)]}
    )


if __name__ == "__main__":
    main()
