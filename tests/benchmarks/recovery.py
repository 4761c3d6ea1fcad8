"""Measures what a lost process costs: kill -9 of a prefill worker in mid-push, of a decode worker in mid-decode, and of
the gateway in mid-stream. Prints JSON.

Under Ray, with one and with two islands of a prefill and a decode worker, while `--clients` send long prompts all the
time; median and worst of `--rounds` kills of each:
detected   from the kill to the gateway's knowing: the island takes no requests any more
token      from the kill to the next token of each request that had to be placed again; for the gateway, of each stream
serving    from the kill to the island's next epoch, or the next gateway, taking requests
Every request must end with the tokens that transformers gives; with `--shape`, random weights of a real shape in 16
bits, with as many as it asked for. On two GPUs the workers of a second island share the GPUs of the first.
A run that is interrupted prints what it has.
"""

import itertools
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tandem.cluster.client import Client
from tandem.cluster.config.cluster_config import load_config
from tandem.cluster.errors import Unavailable
from tandem.cluster.processes.ray_processes import RayProcesses
from tandem.cluster.supervision.launcher import Cluster
from tandem.cluster.tools.random_checkpoint import make_checkpoint
from tandem.proto import inference_pb2
from tests.benchmarks.model_shapes import SHAPES, shape_name, write_shape
from tests.benchmarks.options import Budget, add_list, add_seconds, benchmark_parser
from tests.benchmarks.pair import DEPLOY
from tests.benchmarks.results import at_most, print_result, print_skipped, rounded
from tests.benchmarks.shared_gpus import SharingProcesses
from tests.support.oracle import greedy, load_oracle, random_prompt

PROMPT_TOKENS = 1500
NUM_TOKENS = 120
VOCABULARY = 512
CHUNK = 64  # so that a prompt is pushed in many pieces
NUM_CASES = 4
DETECTION_TARGET_SECONDS = 2.0
PATIENCE_SECONDS = 300.0
ROLES = {"prefill": inference_pb2.ROLE_PREFILL, "decode": inference_pb2.ROLE_DECODE}
TARGETS = (*ROLES, "gateway")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Case:
    """tokens: what must come; None where only their number is known."""

    prompt: list[int]
    tokens: list[int] | None


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
    """Seconds from one kill; tokens: of the requests that were placed again or resumed. detected: None of a gateway."""

    detected: float | None
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
        if len(tokens) != NUM_TOKENS or case.tokens not in (None, tokens):
            self.wrong.append(f"{tokens} came; {case.tokens} are right")

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if not request.attempts]

    def check(self) -> None:
        if self.wrong:
            raise SystemExit(self.wrong[0])


def kill(client: Client, load: Load, target: str) -> Recovery:
    """Kills a process that is at work, and waits until another serves and all that it served has ended."""
    log.info("kill -9: %s", target)
    recovery = kill_gateway(client, load) if target == "gateway" else kill_worker(client, load, ROLES[target])
    log.info("%s: %s", target, recovery)
    return recovery


def kill_worker(client: Client, load: Load, role: "inference_pb2.Role.ValueType") -> Recovery:
    before = {island.name: island.epoch for island in client.cluster_info().islands}
    name, pid = _until(load, lambda: _working(client, role))
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    running = load.running
    _until(load, lambda: not _serves(client, name, before[name]))
    detected = time.monotonic() - killed
    _until(load, lambda: _serves(client, name, before[name] + 1))
    serving = time.monotonic() - killed
    _until(load, lambda: all(request.attempts for request in running))
    again = [request for request in running if request.attempts > 1]
    return Recovery(detected, serving, [request.waited_after(killed) for request in again])


def kill_gateway(client: Client, load: Load) -> Recovery:
    """The process that serves most streams; of as many streams as it served, the longest silences count."""
    _until(load, lambda: any(request.arrivals for request in load.running))
    lost = max(client.cluster_info().gateways, key=lambda process: process.active)
    os.kill(lost.pid, signal.SIGKILL)
    killed = time.monotonic()
    running = load.running
    _until(load, lambda: _replaced(client, lost.pid))
    serving = time.monotonic() - killed
    _until(load, lambda: all(request.attempts for request in running))
    return Recovery(None, serving, sorted(request.waited_after(killed) for request in running)[-lost.active :])


def _replaced(client: Client, lost: int) -> bool:
    with suppress(Unavailable):
        return all(process.pid not in (0, lost) for process in client.cluster_info().gateways)
    return False


def _working(client: Client, role: "inference_pb2.Role.ValueType") -> tuple[str, int] | None:
    """Island and pid of a worker that has a request in hand right now."""
    islands = client.cluster_info().islands
    working = ((island.name, worker) for island in islands for worker in island.workers if worker.running)
    return next(((name, worker.pid) for name, worker in working if worker.role == role), None)


def _serves(client: Client, name: str, epoch: int) -> bool:
    """Returns whether the island takes requests in that epoch."""
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


def make_cases(model: Path, exact: bool) -> list[Case]:
    prompts = [random_prompt(PROMPT_TOKENS - 100 * number, number, VOCABULARY) for number in range(NUM_CASES)]
    if not exact:
        return [Case(prompt, None) for prompt in prompts]
    oracle = load_oracle(model, device="cuda" if torch.cuda.is_available() else "cpu")
    return [Case(prompt, greedy(oracle, prompt, NUM_TOKENS)) for prompt in prompts]


def measure(
    cluster: Cluster, cases: Sequence[Case], order: Iterable[str], num_clients: int, found: dict[str, list[Recovery]]
) -> None:
    """order: what is to be killed, each time. Adds to found, by target, as kills come."""
    address = cluster.start()
    log.info("started: %s", cluster.clock.seconds)
    try:
        with Client(address) as client:
            for case in cases:  # what is prepared at first use is no part of a recovery
                _ = list(client.generate(case.prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
            log.info("each prompt was served once")
            with Load(address, cases, num_clients) as load:
                for name in order:
                    found.setdefault(name, []).append(kill(client, load, name))
            load.check()
            _until(load, lambda: _is_idle(client))
            log.info("all %d requests are done, all pages free", len(load.requests))
    finally:
        cluster.stop()


def _is_idle(client: Client) -> bool:
    workers = [worker for island in client.cluster_info().islands for worker in island.workers]
    return all(worker.free_pages == worker.num_pages and not worker.draining_pages for worker in workers)


def summary(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    seconds = {
        "detected": [one.detected for one in recoveries if one.detected is not None],
        "token": [token for one in recoveries for token in one.tokens],
        "serving": [one.serving for one in recoveries],
    }
    return {"kills": len(recoveries), "placed_again": len(seconds["token"])} | {
        f"{part}_seconds": {"median": rounded(statistics.median(values)), "worst": rounded(max(values))}
        for part, values in seconds.items()
        if values
    }


def settings(folder: Path, shape: str | None, gpus: bool, islands: int, gateways: int) -> dict[str, Any]:
    """Returns the settings that differ from deploy/'s file."""
    common: dict[str, Any] = {
        "name": f"bench-{os.getpid()}",
        "num_islands": islands,
        "model.path": str(folder / (shape or "model")),
        "gateway.port": 0,
        "gateway.processes": gateways,
        "gateway.max_attempts": 20,
        "recovery.max_restarts": 10_000,
        "cache.num_pages": 1024,
        "cache.gpu_memory_utilization": None,
        "cache.prefix_sharing": False,  # each prompt is computed and pushed, however often it came
        "scheduler.max_batch_tokens": CHUNK,
        "scheduler.roles": "split",
    }
    if shape is not None:
        common |= {"model.load_format": "dummy", "model.max_model_len": 4096, "scheduler.max_batch_tokens": 8 * CHUNK}
    if not gpus:
        common["island.threads_per_worker"] = 1
    return common


def main() -> None:
    parser = benchmark_parser(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    add_list(parser, "--targets", default=TARGETS, choices=TARGETS)
    parser.add_argument("--clients", type=int, default=4)
    add_list(parser, "--islands", int, default=[1, 2], choices=(1, 2))
    parser.add_argument("--gateways", type=int, default=1, help="processes of the gateway")
    parser.add_argument("--shape", type=shape_name, choices=list(SHAPES))
    add_seconds(parser)
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    for name in (__name__, "tandem"):
        logging.getLogger(name).setLevel(logging.INFO)  # each kill as it comes, for a run may be cut short
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        print_skipped("needs two CUDA devices of one host, or none")
        return
    config = DEPLOY / ("gpu-1p1d.yaml" if num_gpus else "local.yaml")
    found: dict[str, dict[str, list[Recovery]]] = {}
    with tempfile.TemporaryDirectory() as name, suppress(KeyboardInterrupt):
        folder = Path(name)
        if options.shape is None:
            make_checkpoint(folder / "model", arch="llama", size="tiny", seed=0)
        else:
            write_shape(options.shape, folder)
        cases = make_cases(folder / "model", options.shape is None)
        budget = Budget(options.seconds)
        for islands in budget.within(options.islands):
            processes = SharingProcesses(2 * islands) if 0 < num_gpus < 2 * islands else RayProcesses()
            values = settings(folder, options.shape, num_gpus > 0, islands, options.gateways)
            cluster = Cluster(load_config(config, values), processes)
            kills = found.setdefault(f"islands {islands}", {})
            measure(cluster, cases, budget.within(list(options.targets) * options.rounds), options.clients, kills)
    result: dict[str, Any] = {
        islands: {role: summary(kills) for role, kills in roles.items()} for islands, roles in found.items()
    }
    kills = [one for roles in found.values() for kills in roles.values() for one in kills]
    detected = [one.detected for one in kills if one.detected is not None]
    targets = (
        [at_most("kill to admission stopped, worst, s", max(detected), DETECTION_TARGET_SECONDS)] if detected else []
    )
    cases_of = {"gateways": options.gateways} if options.gateways > 1 else {}
    result |= {"targets": targets} | cases_of | ({"case": options.shape} if options.shape else {})
    print_result(result, options, gpus=min(num_gpus, 2 * max(options.islands)))


if __name__ == "__main__":
    main()
