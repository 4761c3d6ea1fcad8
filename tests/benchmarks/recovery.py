"""What a lost worker costs: kill -9 of a prefill worker in mid-push and of a decode worker in mid-decode. Prints JSON.

Under Ray, with one and with two islands of a prefill and a decode worker, while `--clients` send long prompts all the
time; median and worst of `--rounds` kills of each:
detected   from the kill to the gateway's knowing: the island takes no requests any more
token      from the kill to the next token of each request that had to be placed again
serving    from the kill to the island's next epoch taking requests
Every request must end with the tokens that it had undisturbed, and those are transformers'. On two GPUs one island, on
four two.
"""

import argparse
import itertools
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.cluster.client import Client
from tandem.cluster.config import load_config
from tandem.cluster.launcher import Cluster
from tandem.proto import inference_pb2
from tandem.workers.random_checkpoint import make_checkpoint
from tests.benchmarks.pair import DEPLOY
from tests.benchmarks.results import at_most, print_result, print_skipped, rounded
from tests.oracle import greedy, load_oracle, random_prompt

PROMPT_TOKENS = 1500
NUM_TOKENS = 200
VOCABULARY = 512
CHUNK = 64  # so that a prompt is pushed in many pieces
NUM_CASES = 4
DETECTION_TARGET_SECONDS = 2.0
PATIENCE_SECONDS = 300.0
ROLES = {"prefill": inference_pb2.ROLE_PREFILL, "decode": inference_pb2.ROLE_DECODE}


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    tokens: list[int]


@dataclass
class Request:
    """arrivals: when each token came. attempts: the gateway's, once it has ended."""

    began: float
    arrivals: list[float] = field(default_factory=list)
    attempts: int = 0

    def waited_after(self, moment: float) -> float:
        """The longest silence since then, which ends with a token."""
        after = [moment, *(arrival for arrival in self.arrivals if arrival > moment)]
        return max(later - earlier for earlier, later in itertools.pairwise(after))


@dataclass(frozen=True)
class Recovery:
    """Seconds from one kill; tokens: of the requests that were placed again."""

    detected: float
    serving: float
    tokens: list[float]


class Load:
    """Clients that send one request after the other, and compare all tokens; `with Load(…) as load:`."""

    def __init__(self, address: str, cases: Sequence[Case], num_clients: int) -> None:
        self._address = address
        self._cases = cases
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)]
        self.requests: list[Request] = []
        self.wrong: list[str] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        with Client(self._address) as client:
            while not self._over.is_set() and not self.wrong:
                try:
                    self._request(client, rng.choice(self._cases))
                except Exception as error:
                    self.wrong.append(f"{type(error).__name__}: {error}")

    def _request(self, client: Client, case: Case) -> None:
        request, tokens = Request(time.monotonic()), []
        self.requests.append(request)
        for update in client.generate(case.prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True):
            request.arrivals.extend([time.monotonic()] * len(update.token_ids))
            tokens += update.token_ids
            if update.timings is not None:
                request.attempts = update.timings.attempts
        if tokens != case.tokens:
            self.wrong.append(f"{tokens} came; {case.tokens} are right")

    def check(self) -> None:
        if self.wrong:
            raise SystemExit(self.wrong[0])


def kill(client: Client, load: Load, role: "inference_pb2.Role.ValueType") -> Recovery:
    """Kills a worker of that role that is at work, and waits until its island serves again."""
    before = {island.name: island.epoch for island in client.cluster_info().islands}
    name, pid = _until(load, lambda: _working(client, role))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    running = [request for request in load.requests if not request.attempts]
    _until(load, lambda: not _serves(client, name, before[name]))
    detected = time.monotonic() - killed
    _until(load, lambda: _serves(client, name, before[name] + 1))
    serving = time.monotonic() - killed
    _until(load, lambda: all(request.attempts for request in running))
    again = [request for request in running if request.attempts > 1]
    recovery = Recovery(detected, serving, [request.waited_after(killed) for request in again])
    log.info("%s: %s", inference_pb2.Role.Name(role), recovery)
    return recovery


def _working(client: Client, role: "inference_pb2.Role.ValueType") -> tuple[str, int] | None:
    """Island and pid of a worker that has a request in hand right now."""
    islands = client.cluster_info().islands
    working = ((island.name, worker) for island in islands for worker in island.workers if worker.running)
    return next(((name, worker.pid) for name, worker in working if worker.role == role), None)


def _serves(client: Client, name: str, epoch: int) -> bool:
    """Whether the island takes requests in that epoch."""
    islands = client.cluster_info().islands
    return any(island.name == name and island.epoch == epoch and island.workers for island in islands)


def _until(load: Load, found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := found()):
        load.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing came of it within {PATIENCE_SECONDS:g} s")
        time.sleep(0.002)
    return value


def make_cases(address: str, model: Path) -> list[Case]:
    """Undisturbed, and as transformers has it."""
    oracle, cases = load_oracle(model), []
    with Client(address) as client:
        for number in range(NUM_CASES):
            prompt = random_prompt(PROMPT_TOKENS - 100 * number, number, VOCABULARY)
            updates = client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
            tokens = [token for update in updates for token in update.token_ids]
            if tokens != greedy(oracle, prompt, NUM_TOKENS):
                raise SystemExit(f"prompt {number}: the cluster's tokens are not transformers'")
            cases.append(Case(prompt, tokens))
    return cases


def measure(config: Path, overrides: dict[str, Any], rounds: int, num_clients: int) -> dict[str, Any]:
    cluster = Cluster(load_config(config, overrides))
    address = cluster.start()
    try:
        cases = make_cases(address, Path(overrides["model.path"]))
        with Client(address) as client, Load(address, cases, num_clients) as load:
            found = {name: [kill(client, load, role) for _ in range(rounds)] for name, role in ROLES.items()}
        load.check()
        with Client(address) as client:
            _until(load, lambda: _is_idle(client))
    finally:
        cluster.stop()
    return {"requests": len(load.requests)} | {name: summary(recoveries) for name, recoveries in found.items()}


def _is_idle(client: Client) -> bool:
    workers = [worker for island in client.cluster_info().islands for worker in island.workers]
    return all(worker.free_pages == worker.num_pages and not worker.draining_pages for worker in workers)


def summary(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    seconds = {
        "detected": [one.detected for one in recoveries],
        "token": [token for one in recoveries for token in one.tokens],
        "serving": [one.serving for one in recoveries],
    }
    return {"kills": len(recoveries), "placed_again": len(seconds["token"])} | {
        f"{part}_seconds": {"median": rounded(statistics.median(values)), "worst": rounded(max(values))}
        for part, values in seconds.items()
        if values
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)  # each kill as it comes, for a run may be cut short
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        print_skipped("needs two CUDA devices of one host, or none")
        return
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder) / "model", arch="llama", size="tiny", seed=0)
        common: dict[str, Any] = {
            "name": f"bench-{os.getpid()}",
            "model.path": f"{folder}/model",
            "gateway.port": 0,
            "gateway.max_attempts": 20,
            "recovery.max_restarts": 10_000,
            "cache.num_pages": 1024,
            "cache.gpu_memory_utilization": None,
            "cache.prefix_sharing": False,  # each prompt is computed and pushed, however often it came
            "scheduler.max_batch_tokens": CHUNK,
        }
        if not num_gpus:
            common["island.threads_per_worker"] = 1
        config = DEPLOY / ("gpu-1p1d.yaml" if num_gpus else "local.yaml")
        counts = [count for count in (1, 2) if not num_gpus or 2 * count <= num_gpus]
        islands = {
            f"islands {count}": measure(config, common | {"num_islands": count}, options.rounds, options.clients)
            for count in counts
        }
    worst = max(numbers[role]["detected_seconds"]["worst"] for numbers in islands.values() for role in ROLES)
    print_result(
        islands | {"targets": [at_most("kill to admission stopped, worst, s", worst, DETECTION_TARGET_SECONDS)]}
    )


if __name__ == "__main__":
    main()
